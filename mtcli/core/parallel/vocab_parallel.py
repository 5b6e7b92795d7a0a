"""A vocabulary sharded over tp: the token table, its logits, and their cross entropy.

On a GPU the loss is computed in chunks of tokens, together with the head's GEMM. A chunk's logits
are overwritten by their gradient, which is multiplied into the gradients of activations and weight
at once. So the three GEMMs of the head run once each, and no [T, V] tensor is allocated. On CPU the
logits of all tokens are overwritten by their exponentials and then by their gradient. T tokens, D
hidden, V columns of this rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtcli.core.parallel.collectives import (
    all_gather,
    all_reduce,
    copy_in,
    gather_in,
    scatter_out,
    sum_out,
)
from mtcli.core.parallel.factory import LayerFactory, TokenLoss
from mtcli.core.parallel.groups import Axis
from mtcli.kernels.cross_entropy import (
    cross_entropy_backward_,
    exp_and_target_,
    logits_gradient_,
    losses_and_gradient_,
    row_max,
    row_parts,
)
from mtcli.kernels.embedding import embedding
from mtcli.kernels.gemm import add_matmul_, add_weight_gradient_, linear, matmul
from mtcli.kernels.gradient_sink import GradientSink
from mtcli.kernels.limits import LOSS_CHUNK_BYTES, chunk_rows
from mtcli.kernels.softcap import softcap
from mtcli.kernels.triton_launch import runs_triton

TIED_ROWS = 64  # rows of logits that are copied at a time


class VocabShard(NamedTuple):
    """This rank's columns of a vocabulary: `valid` ids from `first` on, then padding."""

    first: int
    valid: int
    tp: Axis

    def owned(self, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """(each label's column [T], whether the label is in this rank's shard [T])."""
        local_T = labels_T - self.first
        return local_T, (local_T >= 0) & (local_T < self.valid)

    def column_or_none(self, labels_T: Tensor) -> Tensor:
        """Each label's column [T]; -1 for a label of another rank's shard."""
        local_T, owned_T = self.owned(labels_T)
        return local_T.masked_fill(~owned_T, -1)

    def lse_and_target(
        self, logits_TV: Tensor, local_T: Tensor, cap: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The log-sum-exp, the label's logit and the largest logit [T], over all ranks' columns,
        with a soft cap. `local_T` is -1 for another rank's label.

        Exchanges 3 numbers per token: the maximum, the sum of exponentials, the label's logit.
        """
        mine_T, sums_T, target_T = row_parts(logits_TV, local_T, self.valid, cap)
        top_T = all_reduce(mine_T.clone(), self.tp, dist.ReduceOp.MAX)
        sums_T = sums_T * (mine_T - top_T).exp()
        sums_T, target_T = all_reduce(torch.stack([sums_T, target_T]), self.tp)
        return top_T + sums_T.log(), target_T, top_T

    def losses_and_gradient_(
        self, logits_TV: Tensor, local_T: Tensor, grad_T: Tensor, cap: float = 0.0
    ) -> Tensor:
        """The cross entropy of each label [T]; overwrites the logits by the gradient of these times
        `grad_T`."""
        if self.tp.size == 1:
            return losses_and_gradient_(logits_TV, local_T, grad_T, self.valid, cap)
        lse_T, target_T, _ = self.lse_and_target(logits_TV, local_T, cap)
        logits_gradient_(logits_TV, lse_T, local_T, grad_T, self.valid, cap)
        return lse_T - target_T

    def exp_parts_(
        self, logits_TV: Tensor, top_T: Tensor, labels_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Overwrites logits by exp(logits - top). Returns, [T] each: the sum of exponentials and
        label's logit - top over all ranks, the label's local column, and whether it is on this
        rank."""
        local_T, owned_T = self.owned(labels_T)
        local_T = local_T.masked_fill(~owned_T, 0)
        _, sums_T, target_T = exp_and_target_(logits_TV, top_T, local_T, self.valid)
        target_T = target_T.masked_fill(~owned_T, 0.0)
        sums_T, target_T = all_reduce(torch.stack([sums_T, target_T]), self.tp)
        return sums_T, target_T, local_T, owned_T


class VocabEmbedding(nn.Module):
    """A token table with its rows sharded over tp; a tied head uses the same table.

    Rank k holds rows [k * V, (k + 1) * V) of the padded vocabulary.
    """

    def __init__(self, name: str, build: LayerFactory) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        layout = build.groups.layout
        box = build.table[f"{name}.weight"].box(layout, build.groups.rank)
        self.shard = VocabShard(box.start[0], box.size[0], build.groups.tp)
        self.leave = scatter_out if build.sequence_parallel else sum_out
        self.enter = gather_in if build.sequence_parallel else copy_in
        self.gradient_sinks = build.gradient_sinks
        # A head's GEMMs are torch's own, and W passes would keep its logits' gradient alive.
        self.linear = replace(build, weight_passes=None, gemms=None).linear

    def forward(self, tokens_T: Tensor) -> Tensor:
        """ids [T] -> x_TD [T/tp, D]: each rank looks up its own ids, zeros for others, and ranks
        sum."""
        return self.leave(self.own_rows(tokens_T), self.shard.tp)

    def own_rows(self, tokens_T: Tensor) -> Tensor:
        """The rows [T, D] of this rank's ids; zeros for other ids."""
        sink = self.gradient_sinks.of(self.weight)
        # One rank owns all ids: 8 launches less, one of them over [T, D] in each direction.
        if self.shard.tp.size == 1:
            return embedding(tokens_T, self.weight, sink)
        local_T, owned_T = self.shard.owned(tokens_T)
        elsewhere_T = ~owned_T
        x_TD = embedding(local_T.masked_fill(elsewhere_T, 0), self.weight, sink)
        return x_TD.masked_fill(elsewhere_T[:, None], 0.0)


class VocabLoss(TokenLoss):
    """The cross entropy of activations x_TD [T/tp, D], with logits from a token table, an optional
    bias [V] and a soft cap, which is none where it is 0."""

    def __init__(self, table: VocabEmbedding, bias: Tensor | None = None, cap: float = 0.0) -> None:
        self.table, self.shard, self.tp, self.bias = table, table.shard, table.shard.tp, bias
        self.cap = cap

    def logits(self, x_TD: Tensor) -> Tensor:
        """x_TD [T/tp, D] -> capped logits_TV, padding columns included."""
        return softcap(self.uncapped(x_TD), self.cap)

    def uncapped(self, x_TD: Tensor) -> Tensor:
        """x_TD [T/tp, D] -> logits_TV without the cap."""
        return self.table.linear(self.table.enter(x_TD, self.tp), self.table.weight, self.bias)

    def losses(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        """The cross entropy of each label [T], float32 (float64 for float64 logits)."""
        if not self._in_chunks(x_TD):
            return VocabCrossEntropy.apply(self.logits(x_TD), labels_T, self.shard)  # type: ignore[no-untyped-call, no-any-return]  # torch
        assert not torch.is_grad_enabled(), "on a GPU `loss` is what has a gradient"
        x_TD = self.table.enter(x_TD, self.tp)
        table = self.table.weight, self.bias
        return losses_in_chunks(x_TD, table, labels_T, self.shard, self.cap)

    def loss(
        self, x_TD: Tensor, labels_T: Tensor, weights_T: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(sum of weight * cross entropy, that times `scale`, to differentiate); weights of None
        are 1."""
        if not self._in_chunks(x_TD):
            return super().loss(x_TD, labels_T, weights_T, scale)
        x_TD = self.table.enter(x_TD, self.tp)
        table = self.table.weight, self.bias
        sink = self.table.gradient_sinks.of(self.table.weight)
        losses_T, scaled = ChunkedLoss.apply(  # type: ignore[no-untyped-call]  # torch
            x_TD, labels_T, weights_T, *table, self.shard, scale, self.cap, sink
        )
        return losses_T.sum(), scaled

    def _in_chunks(self, x_TD: Tensor) -> bool:
        """Whether logits are computed within the loss, a chunk of tokens at a time."""
        return runs_triton(x_TD)

    @torch.no_grad()
    def score(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability [N], whether the target is the argmax [N]); of equal logits the lowest
        id is the argmax."""
        first, valid, tp = self.shard
        local_N = self.shard.column_or_none(targets_N)
        lse_N, target_N, top_N = self.shard.lse_and_target(logits_NV, local_N)
        best_N = target_N == top_N
        before_N = torch.zeros_like(target_N)  # whether a lower id has the same logit
        for rows in best_N.nonzero().flatten().split(TIED_ROWS) if valid else ():
            logits, ids = logits_NV[rows, :valid].max(-1)
            earlier = (logits == top_N[rows]) & (ids + first < targets_N[rows])
            before_N[rows] = earlier.to(before_N.dtype)
        return target_N - lse_N, best_N & (all_reduce(before_N, tp) == 0)

    @torch.no_grad()
    def all_logits(self, logits_NV: Tensor, vocab_size: int) -> Tensor:
        """All-gathers logits [N, V] to [N, vocab_size], without padding."""
        parts = all_gather(logits_NV.T.contiguous(), self.tp)  # padded rows are all at the end
        return parts.T[:, :vocab_size]


class VocabCrossEntropy(torch.autograd.Function):
    """The losses [T] of logits [T, V] that are all in memory (arXiv:1909.08053, section 3).

    Exchanges 3 numbers per token instead of V: the maximum, the sum of exponentials and the
    target's logit.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, shard: VocabShard) -> Tensor:
        """Returns the losses; overwrites the logits, which nothing else may read."""
        logits_TV = logits_TV.detach()
        top_T = all_reduce(row_max(logits_TV[:, : shard.valid]), shard.tp, dist.ReduceOp.MAX)
        sums_T, target_T, *local = shard.exp_parts_(logits_TV, top_T, labels_T)
        ctx.save_for_backward(logits_TV, sums_T, *local)
        return sums_T.log() - target_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient of the logits, in their memory."""
        exps, sums_T, local_T, owned_T = ctx.saved_tensors
        return cross_entropy_backward_(exps, sums_T, local_T, owned_T, grad_T), None, None


class ChunkedLoss(torch.autograd.Function):
    """(weighted losses [T], without a gradient; scale * their sum, to differentiate); weights of
    None are 1.

    Gradients are computed in the forward pass, while a chunk's logits exist, and include `scale`,
    without which float16 gradients would underflow. The backward pass multiplies them by the
    incoming gradient. With several chunks the weight's gradient is summed in float32, 4 * V * D
    bytes, unless it has a sink: that one gets it in the forward pass, so the incoming gradient has
    to be 1.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no containers of tensors
        ctx: Any,
        x_TD: Tensor,
        labels_T: Tensor,
        weights_T: Tensor | None,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        shard: VocabShard,
        scale: float,
        cap: float = 0.0,
        sink: GradientSink | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (losses [T], scale * their sum)."""
        local_T, parts, of_bias = shard.column_or_none(labels_T), [], None
        of_x, of_weight = torch.empty_like(x_TD), None
        grad_T = x_TD.new_full(labels_T.shape, scale, dtype=torch.float32)
        grad_T = grad_T if weights_T is None else grad_T * weights_T
        for rows in chunks(x_TD, weight_VD):
            logits_CV = linear(x_TD[rows], weight_VD, bias_V)
            grads = local_T[rows], grad_T[rows]
            parts.append(shard.losses_and_gradient_(logits_CV, *grads, cap))
            add_matmul_(of_x[rows], logits_CV, weight_VD, beta=0)
            if sink is not None:
                add_weight_gradient_(sink, logits_CV, x_TD[rows])
            elif weight_VD.requires_grad:
                of_weight = _add_gemm(of_weight, logits_CV, x_TD[rows], len(x_TD))
            if bias_V is not None:
                wide = torch.promote_types(bias_V.dtype, torch.float32)
                sums_V = logits_CV.sum(0, dtype=wide)
                of_bias = sums_V if of_bias is None else of_bias.add_(sums_V)
            del logits_CV  # before the next chunk's are made
        ctx.save_for_backward(of_x, of_weight, of_bias)
        ctx.dtype, ctx.is_one = weight_VD.dtype, sink is not None
        losses_T = torch.cat(parts) if weights_T is None else torch.cat(parts) * weights_T
        ctx.mark_non_differentiable(losses_T)
        return losses_T, losses_T.sum() * scale

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the forward pass's gradients times the gradient of the scaled sum."""
        of_x, wide, of_bias = ctx.saved_tensors
        of_weight = None
        if wide is not None:  # in one pass over the sum, wider than the weight of several chunks
            of_weight = torch.mul(wide, grad, out=torch.empty_like(wide, dtype=ctx.dtype))
        if of_bias is not None:
            of_bias = (of_bias * grad).to(ctx.dtype)
        of_x = of_x if ctx.is_one else of_x * grad.to(of_x.dtype)
        return of_x, None, None, of_weight, of_bias, None, None, None, None


@torch.no_grad()
def losses_in_chunks(
    x_TD: Tensor,
    table: tuple[Tensor, Tensor | None],
    labels_T: Tensor,
    shard: VocabShard,
    cap: float = 0.0,
) -> Tensor:
    """The losses [T] without gradients, computed in chunks; `table` is (weight, bias or None)."""
    local_T, parts = shard.column_or_none(labels_T), []
    for rows in chunks(x_TD, table[0]):
        lse_C, target_C, _ = shard.lse_and_target(linear(x_TD[rows], *table), local_T[rows], cap)
        parts.append(lse_C - target_C)
    return torch.cat(parts)


def chunks(x_TD: Tensor, weight_VD: Tensor) -> list[slice]:
    """Slices of rows whose logits are computed together: see `limits.chunk_rows`."""
    step = chunk_rows(weight_VD.shape[0] * x_TD.element_size(), LOSS_CHUNK_BYTES)
    return [slice(i, min(i + step, len(x_TD))) for i in range(0, len(x_TD), step)]


def _add_gemm(total: Tensor | None, g_CV: Tensor, x_CD: Tensor, tokens: int) -> Tensor:
    """total + g^T x, in float32 at least if there are several chunks."""
    wide = torch.promote_types(x_CD.dtype, torch.float32)
    if total is None and len(x_CD) == tokens:
        return matmul(g_CV.T, x_CD)
    if total is None:
        total = g_CV.new_zeros(g_CV.shape[1], x_CD.shape[1], dtype=wide)
    return add_matmul_(total, g_CV.T, x_CD)
