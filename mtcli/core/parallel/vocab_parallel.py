"""Cross entropy over a vocabulary split over tp, on a GPU: in chunks of tokens, with the product.

Only a chunk's logits exist at a time; they become their gradient, which is multiplied into the
gradients of activations and weight at once. So the three products of the head are made once each,
and no [T, V] tensor is held. T tokens, D hidden, V columns of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis
from mtcli.kernels.cross_entropy import logits_gradient_, row_parts
from mtcli.kernels.products import linear, matmul

CHUNK_BYTES = 2**28  # of logits at a time: 1024 tokens of 128k columns in 16 bits


class VocabShard(NamedTuple):
    """This rank's part of a vocabulary: `valid` columns from id `first` on, then padding."""

    first: int
    valid: int
    tp: Axis

    def owned(self, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """(each label's column [T], whether it is one of this rank's [T])."""
        local_T = labels_T - self.first
        return local_T, (local_T >= 0) & (local_T < self.valid)

    def lse_and_target(self, logits_TV: Tensor, local_T: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp and the label's logit [T] over all ranks; -1 is a label elsewhere.

        Exchanges 3 numbers per token: the maximum, the sum of exponentials, the label's logit.
        """
        mine_T, sums_T, target_T = row_parts(logits_TV, local_T, self.valid)
        top_T = all_reduce(mine_T.clone(), self.tp, dist.ReduceOp.MAX)
        sums_T = sums_T * (mine_T - top_T).exp()
        sums_T, target_T = all_reduce(torch.stack([sums_T, target_T]), self.tp)
        return top_T + sums_T.log(), target_T


class FusedCrossEntropy(torch.autograd.Function):
    """The losses [T] of logits, in two passes over them: they become their own gradient."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, shard: VocabShard) -> Tensor:
        """Returns the losses [T]."""
        logits_TV, local_T = logits_TV.detach(), _column_or_none(labels_T, shard)
        lse_T, target_T = shard.lse_and_target(logits_TV, local_T)
        ctx.save_for_backward(logits_TV, lse_T, local_T)
        ctx.valid = shard.valid
        return lse_T - target_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        """(softmax - onehot) * grad."""
        return logits_gradient_(*ctx.saved_tensors, grad_T, ctx.valid), None, None


class ChunkedLoss(torch.autograd.Function):
    """(weighted losses [T] to read, scale times their sum to differentiate) of activations and a
    table; weights of None are 1 each.

    Gradients are made in the forward pass, where a chunk's logits are, and times `scale` already,
    without which float16 would lose them; the backward pass multiplies by what it is given. The
    weight's is summed over chunks in float32, 4 * V * D bytes, where there are more than one.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no containers of tensors
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        weights_T: Tensor | None,
        shard: VocabShard,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Returns (losses [T], scale * their sum)."""
        local_T, parts = _column_or_none(labels_T, shard), []
        of_x, of_weight = torch.empty_like(x_TD), None
        for rows in chunks(x_TD, weight_VD):
            logits_CV = linear(x_TD[rows], weight_VD)
            lse_C, target_C = shard.lse_and_target(logits_CV, local_T[rows])
            losses_C, grads = lse_C - target_C, torch.full_like(lse_C, scale)
            if weights_T is not None:
                losses_C, grads = losses_C * weights_T[rows], grads * weights_T[rows]
            parts.append(losses_C)
            logits_gradient_(logits_CV, lse_C, local_T[rows], grads, shard.valid)
            of_x[rows] = matmul(logits_CV, weight_VD)
            of_weight = _with_product(of_weight, logits_CV, x_TD[rows], len(x_TD))
            del logits_CV  # before the next chunk's are made
        assert of_weight is not None, "a micro-batch has tokens"
        ctx.save_for_backward(of_x, of_weight)
        ctx.dtype = weight_VD.dtype
        losses_T = torch.cat(parts)
        ctx.mark_non_differentiable(losses_T)
        return losses_T, losses_T.sum() * scale

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        """What the forward pass has made, times the gradient of the scaled sum."""
        of_x, of_weight = ctx.saved_tensors
        of_weight = (of_weight * grad).to(ctx.dtype)
        return of_x * grad.to(of_x.dtype), of_weight, None, None, None, None


@torch.no_grad()
def losses_in_chunks(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, shard: VocabShard
) -> Tensor:
    """The losses [T] alone, a chunk's logits at a time."""
    local_T, parts = _column_or_none(labels_T, shard), []
    for rows in chunks(x_TD, weight_VD):
        lse_C, target_C = shard.lse_and_target(linear(x_TD[rows], weight_VD), local_T[rows])
        parts.append(lse_C - target_C)
    return torch.cat(parts)


def chunks(x_TD: Tensor, weight_VD: Tensor) -> list[slice]:
    """Rows whose logits fill CHUNK_BYTES at most, in multiples of 128 where that leaves any."""
    fitting = CHUNK_BYTES // (weight_VD.shape[0] * x_TD.element_size())
    step = max(1, fitting // 128 * 128 or fitting)
    return [slice(i, min(i + step, len(x_TD))) for i in range(0, len(x_TD), step)]


def _column_or_none(labels_T: Tensor, shard: VocabShard) -> Tensor:
    local_T, owned_T = shard.owned(labels_T)
    return local_T.masked_fill(~owned_T, -1)


def _with_product(total: Tensor | None, g_CV: Tensor, x_CD: Tensor, tokens: int) -> Tensor:
    """total + g^T x, in float32 at least where there are other chunks."""
    wide = torch.promote_types(x_CD.dtype, torch.float32)
    if total is None and len(x_CD) == tokens:
        return matmul(g_CV.T, x_CD)
    if total is None:
        total = g_CV.new_zeros(g_CV.shape[1], x_CD.shape[1], dtype=wide)
    if x_CD.dtype == wide:
        return total.addmm_(g_CV.T, x_CD)
    if x_CD.device.type == "cpu":  # torch has no such product there
        return total.addmm_(g_CV.T.to(wide), x_CD.to(wide))
    return torch.addmm(total, g_CV.T, x_CD, out_dtype=wide, out=total)
