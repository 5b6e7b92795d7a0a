"""One-dimensional tensor parallelism: Megatron-LM's layers, and the factory that builds them.

T tokens of a micro-batch, D hidden, F a layer's inner width. Between the layers a rank's x_TD is
[T/tp, D] under sequence parallelism (arXiv:2205.05198, section 4.2.2) and [T, D] without
(arXiv:1909.08053, section 3).
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.parallel.collectives import all_to_all, copy_in, gather_in, scatter_out, sum_out
from mtcli.core.parallel.factory import Exchange, LayerFactory
from mtcli.core.parallel.norms import AddNorm, Norm, ShardedNorm
from mtcli.core.parallel.overlap import (
    Overlap,
    OverlappedColumn,
    OverlappedRow,
    hides_collectives,
)
from mtcli.core.parallel.vocab_parallel import VocabEmbedding, VocabLoss
from mtcli.kernels.activation import Activation


class TensorParallelLayers(LayerFactory):
    """The layer factory of one-dimensional tensor parallelism."""

    @property
    def enter(self) -> Exchange:
        """The collective on x_TD ahead of a column-parallel GEMM: all-gather, or the identity."""
        return gather_in if self.sequence_parallel else copy_in

    @property
    def leave(self) -> Exchange:
        """The collective on the output of a row-parallel GEMM: reduce-scatter, or all-reduce."""
        return scatter_out if self.sequence_parallel else sum_out

    @property
    def column_gemm(self) -> Callable[..., Tensor]:
        """(x, weight, bias) -> x weight^T + bias of a column-parallel layer."""
        return self.linear

    @property
    def row_gemm(self) -> Callable[..., Tensor]:
        """(x, weight) -> x weight^T of a row-parallel layer."""
        return self.linear

    @property
    def activated_row_gemm(self) -> Callable[..., Tensor]:
        """(activation, x, inner bias, weight) -> `row_gemm` of (activation(x + bias), weight)."""
        return self.activated_linear

    def overlap(self, x: Tensor, weight: Tensor) -> Overlap | None:
        """What a layer of x exchanges beside its GEMMs; None where they take turns."""
        tp, takes_turns = self.groups.tp, self.gemms is not None or not self.tp_overlap
        if tp.size == 1 or takes_turns or not hides_collectives(x):
            return None
        return Overlap(tp, self.sequence_parallel, self.defer, self.sink_of(x, weight))

    def overlapped_column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """`column_gemm` of what `enter` returns of x; None where they take turns."""
        overlap = self.overlap(x, weight)
        if overlap is None:
            return None
        return cast(Tensor, OverlappedColumn.apply(x, weight, bias, overlap))  # type: ignore[no-untyped-call]  # torch

    def overlapped_row(
        self, activation: Activation | None, x: Tensor, bias: Tensor | None, weight: Tensor
    ) -> Tensor | None:
        """`leave` of `row_gemm` of activation(x + bias); None where they take turns."""
        overlap = self.overlap(x, weight)
        if overlap is None:
            return None
        if activation is not None and not self.recomputes(x):
            x, bias, activation = activation.forward(x, bias), None, None
        return cast(Tensor, OverlappedRow.apply(x, bias, weight, activation, overlap))  # type: ignore[no-untyped-call]  # torch

    def column_linear(self, name: str) -> "ColumnLinear":
        """A linear layer whose outputs are sharded over tp."""
        return ColumnLinear(name, self)

    def share_heads(self, name: str) -> nn.Module:
        """Exchanges columns for heads, where tp has more ranks than there are key-value heads."""
        exchange = HeadExchange(name, self)
        return exchange if exchange.sharers > 1 else nn.Identity()

    def row_linear(self, name: str) -> "RowLinear":
        """A linear layer whose inputs are sharded over tp."""
        return RowLinear(name, self)

    def embedding(self, name: str) -> VocabEmbedding:
        """A token table whose rows are sharded over tp."""
        return VocabEmbedding(name, self)

    def norm(self, name: str, model: ModelConfig) -> Norm:
        """A norm of whole rows, or of rows whose columns tp ranks shard."""
        layout = self.groups.layout
        is_sharded = layout.tp > 1 and "tp" in self.table[f"{name}.weight"].axes(layout)
        return (ShardedNorm if is_sharded else Norm)(name, model, self)

    def add_norm(self, name: str, model: ModelConfig) -> AddNorm:
        """A residual sum and its norm, which tp ranks replicate."""
        return AddNorm(name, model, self)

    def loss(
        self, table: VocabEmbedding, bias: nn.Parameter | None = None, cap: float = 0.0
    ) -> VocabLoss:
        """Cross entropy over a vocabulary sharded over tp."""
        return VocabLoss(table, bias, cap)


class ColumnLinear(nn.Module):
    """y = x W^T + b with the rows of W sharded over tp: each rank computes its own columns of y.

    x_TD [T/tp, D] -> y_TF [T, F/tp]. A RowLinear follows without a collective in between. F is the
    product of a weight's leading dims [..., D].
    """

    def __init__(self, name: str, build: TensorParallelLayers) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.adapter = build.adapter(name)
        self.tp, self.linear, self.enter = build.groups.tp, build.column_gemm, build.enter
        self.overlapped = build.overlapped_column

    @property
    def flat_bias(self) -> Tensor | None:
        """b, flattened to [F/tp]; None without a bias."""
        return None if self.bias is None else self.bias.flatten()

    def forward(
        self,
        x_TD: Tensor,
        with_bias: bool = True,
        numbers: Tensor | None = None,
        has_entered: bool = False,
        trains_bias: bool = True,
    ) -> Tensor:
        """Returns this rank's columns of y, without the bias if the caller adds it.

        `numbers` [T] index the dropout mask of adapters. `x_TD` is all tokens [T, D] if it
        `has_entered`. The bias gets no gradient here unless `trains_bias`.
        """
        bias = self.flat_bias if with_bias else None
        if bias is not None and not trains_bias:
            bias = bias.detach()
        if self.adapter is None and not has_entered:
            y_TF = self.overlapped(x_TD, self.weight, bias)
            if y_TF is not None:
                return y_TF
        x_TD = x_TD if has_entered else self.enter(x_TD, self.tp)
        y_TF = self.linear(x_TD, self.weight, bias)
        return y_TF if self.adapter is None else self.adapter(x_TD, y_TF, numbers)


class HeadExchange(nn.Module):
    """Exchanges the columns of query, key and value that a rank computed, for heads.

    With fewer key-value heads than tp, r consecutive ranks share a key-value head. Each computes
    1/r of the columns of its q query heads, key and value, d wide; an all-to-all of the r ranks
    then gives each rank 1/r of the query heads, and all of the key and value head: [T, (q + 2) *
    d/r] -> [T, (q/r + 2) * d]. So key and value activations are replicated, and no weight is.
    """

    def __init__(self, name: str, build: TensorParallelLayers) -> None:
        super().__init__()
        self.exchange, self.tp = all_to_all, build.groups.tp
        described, layout = build.table[f"{name}.weight"], build.groups.layout
        _, inner, self.columns, _ = described.local_shape(layout)
        self.sharers = described.shape[2] // self.columns
        self.queries = inner - 2

    def forward(self, y_TF: Tensor) -> Tensor:
        """Returns query, key and value of this rank's heads."""
        q, kv = y_TF.view(len(y_TF), -1, self.columns).split([self.queries, 2], 1)
        q = q.unflatten(1, (self.sharers, -1)).transpose(0, 1)  # [r, T, q/r, d/r]
        # each rank's queries of it, and all of key and value: [r of the columns, T, q/r + 2, d/r]
        parts = self.exchange(torch.cat([q, kv.expand(self.sharers, *kv.shape)], 2), self.tp)
        return parts.permute(1, 2, 0, 3).flatten(1)


class RowLinear(nn.Module):
    """y = x W^T + b with the columns of W sharded over tp, so that partial products are summed.

    x_TF [T, F/tp] -> y_TD [T/tp, D]. The bias is added once, after the sum, here or by the caller.
    """

    def __init__(self, name: str, build: TensorParallelLayers) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.adapter = build.adapter(name)
        self.tp, self.linear, self.leave = build.groups.tp, build.row_gemm, build.leave
        self.activated, self.overlapped = build.activated_row_gemm, build.overlapped_row

    @property
    def flat_bias(self) -> Tensor | None:
        """b [D], or None."""
        return self.bias

    def forward(
        self, x_TF: Tensor, with_bias: bool = True, numbers: Tensor | None = None
    ) -> Tensor:
        """Returns the summed output, without the bias if the caller adds it; `numbers` as in
        ColumnLinear."""
        if self.adapter is None:
            y_TD = self.overlapped(None, x_TF, None, self.weight)
            if y_TD is not None:
                return self._biased(y_TD, with_bias)
        y_TD = self.linear(x_TF, self.weight)
        y_TD = y_TD if self.adapter is None else self.adapter(x_TF, y_TD, numbers)
        return self._summed(y_TD, with_bias)

    def of_activated(
        self,
        activation: Activation,
        x: Tensor,
        inner_bias: Tensor | None = None,
        with_bias: bool = True,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Returns the output for activation(x + inner_bias), with x [T, F/tp], or [T, 2F/tp] where
        it is gated."""
        if self.adapter is not None:  # the adapter reads the activation too
            return cast(Tensor, self(activation.forward(x, inner_bias), with_bias, numbers))
        y_TD = self.overlapped(activation, x, inner_bias, self.weight)
        if y_TD is not None:
            return self._biased(y_TD, with_bias)
        return self._summed(self.activated(activation, x, inner_bias, self.weight), with_bias)

    def _summed(self, y_TD: Tensor, with_bias: bool) -> Tensor:
        return self._biased(self.leave(y_TD, self.tp), with_bias)

    def _biased(self, y_TD: Tensor, with_bias: bool) -> Tensor:
        return y_TD + self.bias if with_bias and self.bias is not None else y_TD
