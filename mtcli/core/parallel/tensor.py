"""One-dimensional tensor parallelism: Megatron-LM's linear layers, embedding, head and loss.

T tokens of a micro-batch, D hidden, F a layer's inner width, V vocabulary. Between the layers a
rank holds x_TD as [T/tp, D] under sequence parallelism (arXiv:2205.05198, section 4.2.2) and as
[T, D] without (arXiv:1909.08053, section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_in,
    gather_in,
    scatter_out,
    sum_out,
)
from mtcli.core.parallel.factory import LayerFactory
from mtcli.core.parallel.vocab_parallel import (
    ChunkedLoss,
    FusedCrossEntropy,
    VocabShard,
    losses_in_chunks,
)
from mtcli.kernels.activation import Activation
from mtcli.kernels.cross_entropy import (
    cross_entropy_backward_,
    exp_and_target_,
    row_max,
)
from mtcli.kernels.gemm import linear
from mtcli.kernels.launch import runs_triton


class ColumnLinear(nn.Module):
    """y = x W^T + b with the rows of W split over tp: each rank computes its own slice of y.

    x_TD [T/tp, D] -> y_TF [T, F/tp]. Pair it with RowLinear; nothing is exchanged between.
    Of several leading dimensions [..., D] of a weight, y has the product.
    """

    def __init__(self, name: str, build: LayerFactory) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.tp, self.linear = build.groups.tp, build.linear
        self.enter = gather_in if build.sequence_parallel else copy_in

    @property
    def flat_bias(self) -> Tensor | None:
        """b, as the product's columns [F/tp] have it; None where there is none."""
        return None if self.bias is None else self.bias.flatten()

    def forward(self, x_TD: Tensor, with_bias: bool = True) -> Tensor:
        """Returns this rank's columns of y; without the bias where another function adds it."""
        bias = self.flat_bias if with_bias else None
        return self.linear(self.enter(x_TD, self.tp), self.weight, bias)


class HeadsLinear(ColumnLinear):
    """Query, key and value of this rank's heads: x_TD [T/tp, D] -> [T, g * (q + 2) * d], of g
    key-value heads with q query heads each, d wide.

    Of a weight with fewer key-value heads than tp, r consecutive ranks share one. A rank computes
    1/r of the columns of all its query heads, key and value, and the r ranks then exchange them:
    each gets 1/r of the query heads, and the key and the value head, whole. So no weight is on two
    ranks; key and value activations are.
    """

    def __init__(self, name: str, build: LayerFactory) -> None:
        super().__init__(name, build)
        self.exchange = all_to_all
        described, layout = build.table[f"{name}.weight"], build.groups.layout
        _, inner, self.columns, _ = described.local_shape(layout)
        self.sharers = described.shape[2] // self.columns
        self.queries = inner - 2

    def forward(self, x_TD: Tensor, with_bias: bool = True) -> Tensor:
        """Returns this rank's heads."""
        y_TF = super().forward(x_TD, with_bias)
        if self.sharers == 1:
            return y_TF
        q, kv = y_TF.view(len(y_TF), -1, self.columns).split([self.queries, 2], 1)
        q = q.unflatten(1, (self.sharers, -1)).transpose(0, 1)  # [r, T, q/r, d/r]
        # each rank's queries of it, and all of key and value: [r of the columns, T, q/r + 2, d/r]
        parts = self.exchange(torch.cat([q, kv.expand(self.sharers, *kv.shape)], 2), self.tp)
        return parts.permute(1, 2, 0, 3).flatten(1)


class RowLinear(nn.Module):
    """y = x W^T + b with the columns of W split over tp: partial products are summed.

    x_TF [T, F/tp] -> y_TD [T/tp, D]. The bias is added once, after the sum.
    """

    def __init__(self, name: str, build: LayerFactory) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.tp, self.linear, self.activated = build.groups.tp, build.linear, build.activated_linear
        self.leave = scatter_out if build.sequence_parallel else sum_out

    def forward(self, x_TF: Tensor) -> Tensor:
        """Returns the summed output."""
        return self._summed(self.linear(x_TF, self.weight))

    def of_activated(
        self, activation: Activation, x: Tensor, inner_bias: Tensor | None = None
    ) -> Tensor:
        """Returns that of activation(x + inner_bias): x [T, F/tp], of SwiGLU [T, 2F/tp]."""
        return self._summed(self.activated(activation, x, inner_bias, self.weight))

    def _summed(self, y_TD: Tensor) -> Tensor:
        y_TD = self.leave(y_TD, self.tp)
        return y_TD if self.bias is None else y_TD + self.bias


class VocabEmbedding(nn.Module):
    """A token table with its rows split over tp; the same table makes the logits.

    Rank k holds rows [k * V/tp, (k+1) * V/tp) of the padded vocabulary.
    """

    def __init__(self, name: str, build: LayerFactory) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.tp = build.groups.tp
        layout = build.groups.layout
        box = build.table[f"{name}.weight"].box(layout, build.groups.rank)
        self.first, self.valid = box.start[0], box.size[0]
        self.leave = scatter_out if build.sequence_parallel else sum_out
        self.enter = gather_in if build.sequence_parallel else copy_in

    def forward(self, tokens_T: Tensor) -> Tensor:
        """ids [T] -> x_TD [T/tp, D]; ids of other ranks' rows count as zero in the sum."""
        local = tokens_T - self.first
        elsewhere = (local < 0) | (local >= self.valid)
        x_TD = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.leave(x_TD.masked_fill(elsewhere[:, None], 0.0), self.tp)

    def logits(self, x_TD: Tensor) -> Tensor:
        """x_TD [T/tp, D] -> logits_TV [T, V/tp], padding columns included."""
        return linear(self.enter(x_TD, self.tp), self.weight)

    @property
    def shard(self) -> VocabShard:
        """This rank's part of the vocabulary."""
        return VocabShard(self.first, self.valid, self.tp)

    def losses(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        """Cross entropy of each label [T], float32 (float64 for float64 logits)."""
        if not runs_triton(x_TD):
            return _VocabCrossEntropy.apply(self.logits(x_TD), labels_T, self)
        if torch.is_grad_enabled():
            return FusedCrossEntropy.apply(self.logits(x_TD), labels_T, self.shard)
        return losses_in_chunks(self.enter(x_TD, self.tp), self.weight, labels_T, self.shard)

    def loss(self, x_TD: Tensor, labels_T: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(sum of the cross entropies, scale times it to differentiate), logits in chunks."""
        if not runs_triton(x_TD):
            total = self.losses(x_TD, labels_T).sum()
            return total.detach(), total * scale
        x_TD = self.enter(x_TD, self.tp)
        losses_T, scaled = ChunkedLoss.apply(x_TD, self.weight, labels_T, self.shard, scale)
        return losses_T.sum(), scaled

    @torch.no_grad()
    def score(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability [N], whether the target is the argmax [N]); overwrites the logits."""
        real = logits_NV[:, : self.valid]
        best, best_id = real.max(-1) if self.valid else _nothing(logits_NV)
        pairs = all_gather(torch.stack([best.double(), best_id + self.first], 0)[None], self.tp)
        top, winner = pairs[:, 0].max(0)  # the first of equal maxima, which has the lowest id
        argmax = pairs[winner, 1, torch.arange(len(winner), device=winner.device)].long()
        sums, target, *_ = self._softmax_parts_(logits_NV, top.to(_wide(real)), targets_N)
        return target - sums.log(), argmax == targets_N

    def _softmax_parts_(
        self, logits_TV: Tensor, top_T: Tensor, labels_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Overwrites logits by exp(logits - top). Returns the sums of those and label's logit - top
        over all ranks [T], and here: the label's column [T] and whether it is one of ours [T]."""
        local_T, owned_T = self.shard.owned(labels_T)
        local_T = local_T.masked_fill(~owned_T, 0)
        _, sums_T, target_T = exp_and_target_(logits_TV, top_T, local_T, self.valid)
        target_T = target_T.masked_fill(~owned_T, 0.0)
        sums_T, target_T = all_reduce(torch.stack([sums_T, target_T]), self.tp)
        return sums_T, target_T, local_T, owned_T

    @torch.no_grad()
    def all_logits(self, logits_NV: Tensor, vocab_size: int) -> Tensor:
        """The logits of every rank [N, V], without padding."""
        parts = all_gather(logits_NV.T.contiguous(), self.tp)  # padded rows are all at the end
        return parts.T[:, :vocab_size]


class _VocabCrossEntropy(torch.autograd.Function):
    """Cross entropy over a vocabulary split over tp (arXiv:1909.08053, section 3).

    Exchanges 3 numbers per token instead of V: the maximum, the sum of exponentials and the
    target's logit. The logits' memory is overwritten by their exponentials and then by their
    gradient, so no second [T, V] tensor exists.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, vocab: VocabEmbedding) -> Tensor:
        """Returns the losses [T]."""
        logits_TV = logits_TV.detach()
        top_T = all_reduce(row_max(logits_TV[:, : vocab.valid]), vocab.tp, dist.ReduceOp.MAX)
        sums_T, target_T, *local = vocab._softmax_parts_(logits_TV, top_T, labels_T)
        ctx.save_for_backward(logits_TV, sums_T, *local)
        return sums_T.log() - target_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        """(softmax - onehot) * grad."""
        exps, sums_T, local_T, owned_T = ctx.saved_tensors
        return cross_entropy_backward_(exps, sums_T, local_T, owned_T, grad_T), None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _nothing(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The best of no columns, for a rank whose vocabulary shard is all padding."""
    rows = logits_NV.shape[:1]
    return logits_NV.new_full(rows, float("-inf")), logits_NV.new_zeros(rows, dtype=torch.long)
