"""The memory of an array of B models: all parameters of a model follow each other in one row.

So a model's update is an optimizer's rule over two vectors, of what decays and of what does not,
whose hyper-parameters are scalars; and a parameter of all models [B, ...] is a view whose models
are a row apart.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.optim.optimizer import moment_kinds

ALIGNMENT = 16  # elements: 64 bytes of float32, a cache line
CHUNK = 4096  # elements of a row whose norm is summed in the gradients' own dtype


class RowSlot(NamedTuple):
    """Where a parameter is in a row."""

    offset: int
    shape: tuple[int, ...]

    def of(self, rows: Tensor) -> Tensor:
        """The parameter in a row [P] of one model, or in rows [B, P]: a view."""
        return rows.narrow(-1, self.offset, prod(self.shape)).unflatten(-1, self.shape)


class RowLayout:
    """The slots of parameters in a row: of those that decay first, then of the others."""

    def __init__(self, table: Mapping[str, Parameter], layout: ParallelLayout) -> None:
        self.table = table
        self.slots: dict[str, RowSlot] = {}
        self.width = self.decaying = 0
        for name, described in sorted(table.items(), key=lambda item: not item[1].decays):
            slot = RowSlot(self.width, described.stored_shape(layout))
            self.slots[name] = slot
            self.width += -(-prod(slot.shape) // ALIGNMENT) * ALIGNMENT
            if described.decays:
                self.decaying = self.width
        self.width = -(-self.width // CHUNK) * CHUNK

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Every parameter by name, of one row or of all; see `RowSlot.of`."""
        return {name: slot.of(rows) for name, slot in self.slots.items()}

    def halves(self, row: Tensor) -> list[Tensor]:
        """What decays of a model's row, and what does not: two views."""
        return list(row.split([self.decaying, self.width - self.decaying]))


class ModelRow(NamedTuple):
    """The row [P] of one model in each of the array's tensors."""

    weights: Tensor
    masters: Tensor  # the weights themselves, unless these have 16 bits
    gradients: Tensor
    moments: dict[str, Tensor]


class ArrayMemory:
    """Weights, gradients and optimizer state of B models, [B, P] each.

    Weights are of the model's dtype; all else is in float32 at least.
    """

    def __init__(
        self, rows: RowLayout, models: int, optimizer: OptimizerConfig, like: Tensor
    ) -> None:
        """`like` has the weights' dtype and device."""
        self.rows = rows
        wide = torch.promote_types(like.dtype, torch.float32)

        def zeros(dtype: torch.dtype) -> Tensor:
            return like.new_zeros(models, rows.width, dtype=dtype)

        self.weights = zeros(like.dtype)
        self.masters = self.weights if wide == like.dtype else zeros(wide)
        self.gradients = zeros(wide)
        self.moments = {kind: zeros(wide) for kind in moment_kinds(optimizer)}

    def model(self, index: int) -> ModelRow:
        """The row of one model: views."""
        moments = {kind: x[index] for kind, x in self.moments.items()}
        return ModelRow(self.weights[index], self.masters[index], self.gradients[index], moments)

    def compact(self, keep: Sequence[int]) -> None:
        """Keeps the rows of some models, in the order given; the memory of all others is freed."""
        at = torch.tensor(keep, dtype=torch.int64, device=self.weights.device)
        own_masters = self.masters is not self.weights
        self.weights = self.weights[at]
        self.masters = self.masters[at] if own_masters else self.weights
        self.gradients = self.gradients[at]
        self.moments = {kind: x[at] for kind, x in self.moments.items()}

    def gradient_norms(self) -> list[float]:
        """The norm of each model's gradients.

        Chunks are summed in float64: torch's norm of a million float32 numbers is off by 1e-5, and
        its norm in float64 of such numbers takes 13 times as long (CPU, one thread).
        """
        chunks = torch.linalg.vector_norm(self.gradients.unflatten(1, (-1, CHUNK)), dim=2)
        return chunks.double().square().sum(1).sqrt().tolist()

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        own_masters = [self.masters] if self.masters is not self.weights else []
        tensors = [self.weights, *own_masters, self.gradients, *self.moments.values()]
        return sum(x.nbytes for x in tensors)
