"""The sum of a weight's gradients over micro-batches, as GEMMs add to it: Megatron-LM's main_grad.

A GEMM that adds into a float32 sum reads and writes 8 bytes per number. A gradient of bfloat16 that
is added in a pass takes 12: 2 to write and to read it, 8 for the sum. O owners of R rows of D
columns each; a weight's number of rows is at most O * R.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class GradientSink(NamedTuple):
    """The memory of a weight's gradient, and how its sum goes on."""

    blocks_ORD: Tensor  # owners' rows, contiguous in each; rows past the weight's are padding
    rows: int  # of the weight
    # Notes that a gradient is added. Returns the factor beta of what is there: 0 for the first
    # gradient of a step, then 1.
    begin: Callable[[], int]
    first: int = 0  # row

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum: float32 or wider, or the weight's (train.gradients)."""
        return self.blocks_ORD.dtype

    @property
    def row_stride(self) -> int | None:
        """The rows of D from an owner's first row to the next owner's; None where that is no whole
        number."""
        owners, _, columns = self.blocks_ORD.shape
        if owners == 1:
            return 0
        rows, left = divmod(self.blocks_ORD.stride(0), columns)
        return None if left else rows

    def part(self, first: int, rows: int) -> "GradientSink":
        """The sink of some rows; the first gradient of any rows zeroes the others."""
        return GradientSink(self.blocks_ORD, rows, self._begin_from_zero, first)

    def owned_rows(self) -> Iterator[tuple[Tensor, slice]]:
        """Each owner's rows [r, D] of the memory, and which of this sink's rows those are."""
        rows_each, row, end = self.blocks_ORD.shape[1], self.first, self.first + self.rows
        while row < end:
            owner, begin = divmod(row, rows_each)
            count = min(rows_each - begin, end - row)
            yield (
                self.blocks_ORD[owner, begin : begin + count],
                slice(row - self.first, row - self.first + count),
            )
            row += count

    def _begin_from_zero(self) -> int:
        if self.begin() == 0:
            self.blocks_ORD.zero_()
        return 1


class GradientSinks:
    """The sinks of a rank's weights, which the owner of the gradients' memory fills in."""

    def __init__(self) -> None:
        # By id, as tensors compare by element; the weight stays alive, so no other gets its id.
        self._by_id: dict[int, tuple[Tensor, GradientSink]] = {}

    def add(self, weight: Tensor, sink: GradientSink) -> None:
        """Has gradients of a weight summed in a sink."""
        self._by_id[id(weight)] = weight, sink

    def of(self, weight: Tensor) -> GradientSink | None:
        """The sink for the backward of what is computed now; None where autograd has to return the
        gradient.

        A compiled graph returns it, as its backward writes to none but its own tensors.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        found = self._by_id.get(id(weight))
        return None if found is None else found[1]
