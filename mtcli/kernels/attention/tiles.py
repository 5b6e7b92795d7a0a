"""Tiles of a head, and the attention mask as a range of keys: code shared by the flash kernels.

b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width. The
keys of a query are one range: all keys, those up to its own position, or `KeyRanges`, which express
causal and document masks over any block of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from mtcli.kernels.gemm import float32_precision
from mtcli.kernels.triton_launch import cdiv, kernel, power_of_two

if TYPE_CHECKING:
    import triton.language as tl

# e^x is 2^(x log2 e), and 2^x is what a GPU computes.
LOG2_E = 1.4426950408889634
# The mask of a query: all keys, those up to its own position, or `KeyRanges`. The mask of a key,
# for its gradient, is over queries: CAUSAL_FROM_KEY are those from its own position on.
ALL, CAUSAL, CAUSAL_FROM_KEY, RANGES = range(4)


def config(rows: int, columns: int, warps: int, stages: int) -> dict[str, int]:
    """A config with tiles of ROWS, which loops over tiles of COLUMNS."""
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


class KeyRanges(NamedTuple):
    """A mask: query i attends to keys `first[i]` .. `end[i] - 1`; [b, n] int32, ascending."""

    first: Tensor
    end: Tensor


@kernel()
def program_of(length, heads, ROWS: tl.constexpr):
    """(tile of ROWS of a length, sequence, head) of this program of a `head_grid`."""
    tiles = tl.cdiv(length, ROWS)
    pair = tl.program_id(0) // tiles
    return tl.program_id(0) % tiles, (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)


def head_grid(length: int, pairs: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    """A grid with a program for each tile of a length and each of `pairs` pairs (sequence, head).

    It has one dimension, as CUDA has at most 65535 programs in each of the others.
    """
    return lambda meta: (cdiv(length, meta["ROWS"]) * pairs,)


@kernel()
def key_range_of(first_ptr, end_ptr, at, length, other_length, MASK: tl.constexpr):
    """Loads the range (first, end) of keys for queries `at`, or of queries for keys `at`.

    MASK is one of the four above, as a number: a kernel reads no globals.
    """
    # Positions past the end count as the last.
    at = tl.minimum(at, length - 1)
    if MASK == 3:
        return tl.load(first_ptr + at), tl.load(end_ptr + at)
    none = at * 0
    if MASK == 1:
        return none, tl.minimum(at + 1, other_length)
    if MASK == 2:
        return tl.minimum(at, other_length), none + other_length
    return none, none + other_length


@kernel()
def loop_bounds(first, end, COLUMNS: tl.constexpr):
    """(start, inner, outer, stop) of a loop over tiles of COLUMNS, for ranges `first` to `end`.

    Tiles from `inner` to `outer` lie inside every range and need no mask.
    """
    start, stop = tl.min(first, 0) // COLUMNS * COLUMNS, tl.max(end, 0)
    inner = tl.minimum(tl.cdiv(tl.max(first, 0), COLUMNS) * COLUMNS, tl.maximum(start, stop))
    outer = tl.maximum(tl.min(end, 0) // COLUMNS * COLUMNS, inner)
    return start, inner, outer, stop


@kernel()
def offset_of(index, stride, UNIT: tl.constexpr):
    """index * stride, of which the compiler is told that UNIT divides it; see `load_tile`."""
    offset = index * stride
    return tl.multiple_of(offset, UNIT) if UNIT else offset


@kernel()
def head_at(ptr, b, head, of_b, of_head, UNIT: tl.constexpr):
    """The address of a head's first row."""
    return ptr + offset_of(b, of_b, UNIT) + offset_of(head, of_head, UNIT)


@kernel()
def rows_of(ptr, stride, row, rows, width, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """(addresses, row mask, column mask) of rows `row` of a head; see `load_tile`."""
    d, first = tl.arange(0, WIDTH)[None, :], row.to(tl.int64)[:, None] * stride
    inside = d < width
    if UNIT:
        first = tl.multiple_of(first, (UNIT, UNIT))
        inside = tl.max_constancy(inside, (1, UNIT))
    return ptr + first + d, (row < rows)[:, None], inside


@kernel()
def load_tile(
    ptr, stride, row, rows, width, MASKED: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr
):
    """Loads rows `row` of a head [rows, width] as a tile that is WIDTH wide, zeros past the end.

    MASKED where a row may be past the end. UNIT is 0 where width is WIDTH; else it divides the
    width and all strides, of which Triton itself sees multiples of 16 alone.
    """
    at, above, inside = rows_of(ptr, stride, row, rows, width, UNIT, WIDTH)
    if MASKED and UNIT == 0:
        return tl.load(at, mask=above, other=0.0)
    if MASKED:
        return tl.load(at, mask=above & inside, other=0.0)
    if UNIT == 0:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@kernel()
def store_tile(ptr, stride, row, rows, width, tile, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Stores rows `row` of a tile as those of a head [rows, width]; see `load_tile`."""
    at, above, inside = rows_of(ptr, stride, row, rows, width, UNIT, WIDTH)
    tl.store(at, tile, mask=above if UNIT == 0 else above & inside)


def score_scales(d: int, cap: float) -> tuple[float, float]:
    """(scale, bend): in base 2, scores are scale * q k^T, or scale * tanh(bend * q k^T) with a cap
    above 0."""
    return (cap * LOG2_E, d**-0.5 / cap) if cap else (d**-0.5 * LOG2_E, 0.0)


def strides(x: Tensor) -> tuple[int, int, int]:
    """The strides of sequences, heads and tokens of x [b, h, n, d], whose last dim is
    contiguous."""
    assert x.stride(3) == 1, f"strides {x.stride()}"
    return x.stride()[:3]


def contiguous_rows(x: Tensor) -> Tensor:
    """x [b, h, n, d], copied if its last dimension is not contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def empty_by_token(x: Tensor) -> Tensor:
    """An empty tensor [b, h, n, d] like x, laid out as [b, n, h, d] for the next layer."""
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d).transpose(1, 2)


def sizes_and_flags(
    q: Tensor, k: Tensor, *tensors: Tensor
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """(sizes h, g, n, m, d, itemsize; constants), the arguments common to the flash kernels."""
    d, width = q.shape[3], max(16, power_of_two(q.shape[3]))
    common = gcd(d, *(n for x in (q, k, *tensors) for n in strides(x)))
    flags = {
        "UNIT": 0 if d == width else min(16, common & -common),
        "WIDTH": width,
        "PRECISION": float32_precision(),
    }
    return (q.shape[1], k.shape[1], q.shape[2], k.shape[2], d, q.element_size()), flags


def range_arguments(
    causal: bool, first: Tensor | None, end: Tensor | None, like: Tensor
) -> tuple[int, tuple[Tensor, Tensor], int]:
    """(kind of mask, (`first`, `end`) or dummies, their stride over sequences)."""
    if first is None or end is None:
        return CAUSAL if causal else ALL, (like, like), 0
    first, end = first.contiguous(), end.contiguous()
    return RANGES, (first, end), first.shape[1] if len(first) > 1 else 0
