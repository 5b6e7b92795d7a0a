"""Two-dimensional tensor parallelism: layers on a grid of r x c ranks (Optimus, arXiv:2104.05343).

Between the layers a rank's x_TD is [T, D/c]: T are the tokens of its row, 1/r of a micro-batch's
sequences, and D/c its columns of the hidden dimension. Weights are [out/c, in/r] in column-parallel
layers, whose outputs are never sent, and [out/r, in/c] in row-parallel ones, whose inputs never
are.

Three choices differ from the paper's (section 3.2), and send less:
- the paper computes every linear layer as A B, which broadcasts an MLP's inner activations [T, 4D];
  here row-parallel layers are A B^T, which sums [T, D];
- the paper's token table is [V/r, D/c], and T * V logits are summed over c ranks; here it is
  [V/c, D/r], whose logits are never sent, and lookups send rows of the table;
- the paper keeps biases and norms on row 0 and broadcasts them for every micro-batch; here each row
  has a copy, and gradients are summed once a step.
With one row this is Megatron-LM's layout, for which `engines.py` chooses `tensor.py`.
"""

from functools import cached_property

from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.parallel.collectives import (
    all_gather,
    all_to_all,
    copy_in,
    gather_in,
    scatter_out,
    sum_out,
)
from mtcli.core.parallel.factory import Dense, Exchange, as_it_is
from mtcli.core.parallel.norms import ShardedNorm
from mtcli.core.parallel.summa import TensorGrid, gemm, gemm_transposed
from mtcli.core.parallel.tensor import ColumnLinear, TensorParallelLayers
from mtcli.core.parallel.vocab_parallel import VocabEmbedding, VocabLoss
from mtcli.kernels.activation import Activation


class GridLayers(TensorParallelLayers):
    """The layer factory of two-dimensional tensor parallelism, whose GEMMs are SUMMA's."""

    @cached_property
    def grid(self) -> TensorGrid:
        """The grid of this rank's tensor parallel group."""
        return TensorGrid(self.groups)

    @property
    def enter(self) -> Exchange:
        """The identity: the GEMM itself exchanges."""
        return as_it_is

    leave = enter

    def overlap(self, x: Tensor, weight: Tensor) -> None:
        """Returns None: the panels of a GEMM travel beside each other's products."""
        return

    def column_gemm(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """(x [T, D/c], weight [F/c, D/r], bias [F/c]) -> x weight^T + bias [T, F/c]."""
        y_TF = gemm(x_TD, weight.mT, self.grid, self.weight_passes)
        return y_TF if bias is None else y_TF + bias

    def row_gemm(self, x_TF: Tensor, weight: Tensor) -> Tensor:
        """(x [T, F/c], weight [D/r, F/c]) -> x weight^T [T, D/c]."""
        return gemm_transposed(x_TF, weight, self.grid, self.weight_passes)

    def activated_row_gemm(
        self, activation: Activation, x: Tensor, bias: Tensor | None, weight: Tensor
    ) -> Tensor:
        """(activation, x, inner bias, weight) -> `row_gemm` of (activation(x + bias), weight)."""
        return self.row_gemm(activation.forward(x, bias), weight)

    def embedding(self, name: str) -> "GridEmbedding":
        """A token table whose rows are sharded over tp and columns over tp_row."""
        return GridEmbedding(name, self)

    def add_norm(self, name: str, model: ModelConfig) -> "GridAddNorm":  # type: ignore[override]  # no AddNorm
        """A residual sum and its norm, over the columns of a row's ranks."""
        return GridAddNorm(name, model, self)

    def loss(
        self, table: VocabEmbedding, bias: nn.Parameter | None = None, cap: float = 0.0
    ) -> "GridLoss":
        """Cross entropy over a vocabulary sharded over tp."""
        return GridLoss(table, bias, cap, self)

    def dense(self, name: str) -> Dense:
        """Layer(x_TD) -> x_TD: a GEMM of the grid."""
        return Dense(name, self, self.column_gemm)

    def classes(self, name: str) -> Dense:
        """Layer(x_TD [N, D/c]) -> [N, C]: partial logits of this rank's columns, to sum over the
        row."""
        first = self.groups.tp.rank == 0  # the bias is added once
        return Dense(name, self, lambda x, weight, bias: self.linear(x, weight, bias * first))

    @property
    def token_shard(self) -> tuple[int, int]:
        """Returns (0, 1): the inputs are already those of this rank's row."""
        return 0, 1

    def dropout_numbers(self, numbers_N: Tensor) -> Tensor:
        """Numbers n * c + j for row n on column rank j, as each has D/c columns of a row."""
        return numbers_N * self.groups.tp.size + self.groups.tp.rank

    def up_linear(self, name: str) -> ColumnLinear:
        """Layer(latents [T, R]) -> [T, F/c], with a weight [F/c, R] that all rows have."""
        layer = ColumnLinear(name, self)
        layer.linear = self.linear
        return layer

    @property
    def enter_latents(self) -> Exchange:
        """All-gathers [T/c, R] of the ranks of a row -> [T, R]."""
        return gather_in

    def to_tokens(self, x_TD: Tensor) -> Tensor:
        """x_TD [T, D/c] -> [T/c, D]: an all-to-all to different tokens on each rank of the row."""
        parts = all_to_all(x_TD.unflatten(0, (self.groups.tp.size, -1)), self.groups.tp)
        return parts.transpose(0, 1).flatten(1)

    def to_columns(self, y_TD: Tensor) -> Tensor:
        """y_TD [T/c, D] -> [T, D/c], the transpose of `to_tokens`."""
        parts = y_TD.unflatten(1, (self.groups.tp.size, -1)).transpose(0, 1)
        return all_to_all(parts, self.groups.tp).flatten(0, 1)

    def gate(self, x_TD: Tensor, weight: Tensor) -> Tensor:
        """x weight^T [T, 1] of x [T, D/c] and weight [1, D/c], for this rank's columns of y."""
        tp = self.groups.tp
        return copy_in(sum_out(super().gate(x_TD, weight), tp), tp)


class GridAddNorm(ShardedNorm):
    """A residual sum and its norm, over the columns of a row's ranks."""

    def forward(  # type: ignore[override]  # one more result than a Norm's
        self, x_TD: Tensor, y_TD: Tensor | None = None, y_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + y + y_bias, the sum normalised and scaled); None is zero."""
        if y_TD is not None:
            x_TD = x_TD + (y_TD if y_bias is None else y_TD + y_bias)
        return x_TD, super().forward(x_TD)


class GridEmbedding(VocabEmbedding):
    """A token table [V/c, D/r], whose rows are sent to the ranks of the tokens."""

    def __init__(self, name: str, build: GridLayers) -> None:
        super().__init__(name, build)
        self.down = build.groups.tp_row

    def forward(self, tokens_T: Tensor) -> Tensor:
        """ids [T] of this row -> x_TD [T, D/c].

        A rank looks up the tokens of every row in its block of the table, and sends each row its
        own. So [T, D] elements travel down columns and are summed along rows, whatever the
        vocabulary's size.
        """
        x = self.own_rows(all_gather(tokens_T, self.down)).unflatten(0, (self.down.size, -1))
        x_TD = all_to_all(x, self.down).transpose(0, 1).flatten(1)
        parts = x_TD.unflatten(1, (self.shard.tp.size, -1)).transpose(0, 1).flatten(0, 1)
        return scatter_out(parts, self.shard.tp)


class GridLoss(VocabLoss):
    """The cross entropy of logits [T, V/c], all in memory: 1/(r c) of the micro-batch's logits."""

    def __init__(
        self, table: VocabEmbedding, bias: Tensor | None, cap: float, build: GridLayers
    ) -> None:
        super().__init__(table, bias, cap)
        self.grid = build.grid

    def uncapped(self, x_TD: Tensor) -> Tensor:
        """x_TD [T, D/c] -> logits [T, V/c] without the cap, padding columns included.

        Both gradients are computed in one sweep: a deferred one would keep the logits' gradient
        alive.
        """
        y_TV = gemm(x_TD, self.table.weight.mT, self.grid)
        return y_TV if self.bias is None else y_TV + self.bias

    def _in_chunks(self, x_TD: Tensor) -> bool:
        """Returns False: a sweep over the panels makes all logits."""
        return False
