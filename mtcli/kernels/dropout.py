"""Dropout with a counter-based mask (see random.py), fused with the add to the residual.

N rows of D columns; `numbers` [N] are the tokens' global indices. Random number `numbers[row] * D +
column` decides for an element, so no layout changes a mask, and the backward recomputes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.random import keep_rows, keeps, stream_key
from mtcli.kernels.triton_launch import kernel, runs_triton, tile_configs, tile_grid

if TYPE_CHECKING:
    import triton.language as tl


class DropoutStream(NamedTuple):
    """The random stream of a dropout site, and its probability.

    In an array of B models both are tensors [B, 1, 1], int64 and float64; each model has equally
    many rows.
    """

    key: int | Tensor
    drop: float | Tensor
    active: bool  # whether anything may be dropped

    def per_sequence(self, count: int) -> tuple[int | Tensor, float | Tensor]:
        """The key and the probability; in an array, of each of `count` sequences' model, [count, 1,
        1, 1]."""
        if not isinstance(self.key, Tensor):
            return self.key, self.drop
        assert isinstance(self.drop, Tensor), "keys and probabilities are of the same models"
        times = count // len(self.key)
        key, drop = (x.repeat_interleave(times, 0)[..., None] for x in (self.key, self.drop))
        return key, drop


def dropout_stream(site: str, drop: float, seed: int) -> DropoutStream:
    """The stream of a model's site, a function of the seed."""
    return DropoutStream(stream_key(seed, "dropout", site), drop, drop > 0.0)


def dropout_reference(
    y: Tensor, numbers: Tensor, key: int | Tensor, drop: float | Tensor
) -> Tensor:
    """Zeroes elements of y [N, D] with probability `drop`, and divides the others by 1 - drop."""
    columns = y.shape[-1]
    firsts = numbers * columns
    if isinstance(key, Tensor):
        firsts = firsts.view(len(key), -1)
    return y * keep_rows(key, firsts, columns, drop).to(y.dtype).div_(1.0 - drop).view(y.shape)


# fmt: off
@kernel(tile_configs, key=["width"])
def _dropout(
    y_ptr, onto_ptr, numbers_ptr, out_ptr, rows, width, key: tl.int64, threshold: tl.int64, scale,
    ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: on
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    number = tl.load(numbers_ptr + row, mask=row < rows, other=0)
    keep = keeps(key, number * width, column, threshold)
    at = row * width + column
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out = tl.where(keep, y * scale, 0.0)
    if ADDS:
        out += tl.load(onto_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out, mask=inside)


def dropout(
    y: Tensor,
    numbers: Tensor,
    key: int | Tensor,
    drop: float | Tensor,
    onto: Tensor | None = None,
) -> Tensor:
    """`dropout_reference` [N, D], added to `onto` [N, D] if given; on a GPU rounded once.

    Bytes moved: 2 * N * D * itemsize forward, 3 with `onto`; 2 backward.
    """
    if runs_triton(y) and not isinstance(key, Tensor):
        return _dropout_op(y, onto, numbers, key, drop)
    dropped = dropout_reference(y, numbers, key, drop)
    return dropped if onto is None else onto + dropped


@custom_op(
    "dropout(Tensor y, Tensor? onto, Tensor numbers, int key, float drop) -> Tensor",
    saved=lambda out, y, onto, *mask: (onto is not None, *mask),
    backward=lambda grad, adds, *mask: (_dropout_op(grad, None, *mask), grad if adds else None),
)
def _dropout_op(y, onto, numbers, key, drop):
    y, numbers, adds = y.contiguous(), numbers.contiguous(), onto is not None
    onto = onto.contiguous() if adds else y
    rows, width, out = len(numbers), y.shape[-1], torch.empty_like(y)
    scalars = (key, round(drop * 2**32), 1.0 / (1.0 - drop))
    _dropout[tile_grid(rows, width)](y, onto, numbers, out, rows, width, *scalars, ADDS=adds)
    return out
