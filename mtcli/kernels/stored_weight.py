"""Weights as inference on a CPU keeps them, in float32, bfloat16 or int8: y = x W^T + b.

A CPU multiplies a few rows as fast as it reads the weight, so that half the bytes take half the
time. float32 and bfloat16 are packed in oneDNN's blocks, which it reads faster than rows
(`benchmarks/bench_generate.py`). int8 is weight-only, symmetric, with a scale for each output
channel: W[f, d] = values[f, d] * scales[f]. bfloat16 and int8 weights are multiplied by activations
in bfloat16, and sums are float32. T rows of D, F output channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.gemm import gemm_dtype

LARGEST = 127  # of int8: symmetric
# torch's int8 GEMM takes a time per row; it reads past the end of rows of other lengths.
FEW_ROWS, ROW_UNIT = 12, 32
BLOCK = 1024  # channels of int8 that are widened at a time, and multiplied in the cache
PACKED_FOR = 2  # rows: of 1, oneDNN packs nothing


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A weight [F, D], or those of E experts [E, F, D], which these methods of a tensor split."""

    values: Tensor | None  # float32, bfloat16 or int8; None where the packed ones are enough
    scales: Tensor | None = None  # bfloat16 [F] or [E, F], of int8
    packed: Tensor | None = None  # the values in oneDNN's blocks

    def __len__(self) -> int:
        return len(self._any)

    @property
    def _any(self) -> Tensor:
        found = self.values if self.packed is None else self.packed
        assert found is not None, "a weight has values"
        return found

    def unflatten(self, dim: int, sizes: Sequence[int]) -> "StoredWeight":
        """Splits the channels, as `Tensor.unflatten` does."""
        scales = None if self.scales is None else self.scales.unflatten(dim, sizes)
        return StoredWeight(self._any.unflatten(dim, sizes), scales)

    def unbind(self, dim: int) -> "list[StoredWeight]":
        """The weight of each expert, as `Tensor.unbind` does."""
        values = self._any.unbind(dim)
        scales = [None] * len(values) if self.scales is None else self.scales.unbind(dim)
        return [StoredWeight(*one) for one in zip(values, scales, strict=True)]

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias: [..., D] -> [..., F], in the dtype of x."""
        flat = x.reshape(-1, x.shape[-1])
        y = self._gemm(flat if self._any.dtype == x.dtype else flat.bfloat16()).to(x.dtype)
        y = y.view(*x.shape[:-1], len(self))
        return y if bias is None else y + bias

    def rows(self, ids: Tensor) -> Tensor:
        """The rows [..., D] of a table, in float32."""
        assert self.values is not None, "a table is kept in rows too"
        found = F.embedding(ids, self.values).float()
        return found if self.scales is None else found * self.scales[ids][..., None]

    def is_finite(self) -> bool:
        """Whether no number of the weight is NaN or infinite."""
        numbers = self._any.to_dense() if self.scales is None else self.scales
        return bool(numbers.isfinite().all())

    def _gemm(self, x: Tensor) -> Tensor:
        """x W^T of x [T, D] in the dtype of the GEMM's operands."""
        if self.packed is not None:
            linear = torch.ops.mkldnn._linear_pointwise
            return linear(x, self.packed, None, "none", [], "")  # type: ignore[no-any-return]  # torch
        wide, values = gemm_dtype(x), self._any
        if values.dtype == wide:
            return F.linear(x, values)
        if self.scales is None:
            return _in_blocks(x.to(wide), values)
        if len(x) <= FEW_ROWS and x.shape[1] % ROW_UNIT == 0:
            return torch._weight_int8pack_mm(x, values, self.scales)
        return _in_blocks(x.to(wide), values).float() * self.scales


def _in_blocks(x: Tensor, values: Tensor) -> Tensor:
    """x values^T, with a block of channels at a time in the dtype of x."""
    y = x.new_empty(len(x), len(values))
    memory = x.new_empty(min(BLOCK, len(values)), x.shape[1])
    for block, columns in zip(values.split(BLOCK), y.split(BLOCK, 1), strict=True):
        columns.copy_(F.linear(x, memory[: len(block)].copy_(block)))
    return y


def float_weight(values: Tensor, packs: bool, looks_up: bool = False) -> StoredWeight:
    """The weight [F, D] in float32 or bfloat16, packed where it is multiplied and the CPU
    multiplies its dtype; `looks_up` keeps its rows too."""
    if not packs or gemm_dtype(values) != values.dtype or not torch.backends.mkldnn.is_available():
        return StoredWeight(values)
    packed = torch.ops.mkldnn._reorder_linear_weight(values, PACKED_FOR)
    return StoredWeight(values if looks_up else None, packed=packed)


def int8_weight(weight: Tensor, largest: Tensor) -> StoredWeight:
    """The weight [F, D] in int8; `largest` [F] are the largest magnitudes of channels.

    A channel's scale is largest / 127 in bfloat16. That rounds it by 1/512 at most, so that no
    value exceeds 127.
    """
    scales = (largest / LARGEST).bfloat16()
    divisors = scales.float().masked_fill(scales == 0, 1.0)
    return StoredWeight((weight / divisors[:, None]).round().to(torch.int8), scales)
