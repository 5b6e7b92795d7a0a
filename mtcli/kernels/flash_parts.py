"""What the kernels of flash attention share: tiles of a head, and who sees whom.

b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width. Which
keys a query sees is an interval: all, those up to its own place, or `Spans`, as causal masks and
masks of documents are over any block of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from mtcli.kernels.launch import cdiv, kernel, power_of_two
from mtcli.kernels.products import float32_precision

if TYPE_CHECKING:
    import triton.language as tl

LOG2_E = 1.4426950408889634  # e^x is 2^(x log2 e), and 2^x is what a GPU computes
# Which keys a query sees: all, those up to its own place, or `Spans`; and for the gradients of
# keys, by which queries a causal key is seen: those from its own place on.
ALL, CAUSAL, CAUSAL_FROM_KEY, SPANS = range(4)
SIZES = ("ROWS", "COLUMNS", "num_warps", "num_stages")
TILES = tuple(
    dict(zip(SIZES, sizes, strict=True))
    for sizes in (
        (128, 128, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (32, 32, 4, 2),
    )
)


class Spans(NamedTuple):
    """Query i of a row sees keys `first[i]` .. `end[i] - 1`; both [b, n] int32, ascending."""

    first: Tensor
    end: Tensor


@kernel()
def program_of(length, heads, ROWS: tl.constexpr):
    """(tile of ROWS of a length, sequence, head) of this program, which `programs` has launched.

    In one dimension, as CUDA has at most 65535 programs in each of the others.
    """
    tiles = tl.cdiv(length, ROWS)
    pair = tl.program_id(0) // tiles
    return tl.program_id(0) % tiles, (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)


def programs(length: int, pairs: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    """The grid of a program for each tile of a length and each of so many (sequence, head)."""
    return lambda meta: (cdiv(length, meta["ROWS"]) * pairs,)


@kernel()
def span_of(first_ptr, end_ptr, at, mine, others, SEES: tl.constexpr):
    """(first, end) of what each place of mine sees of the others, or is seen by.

    SEES is one of the four above, as a number: a kernel reads no globals.
    """
    at = tl.minimum(at, mine - 1)  # past the end as the last
    if SEES == 3:
        return tl.load(first_ptr + at), tl.load(end_ptr + at)
    none = at * 0
    if SEES == 1:
        return none, tl.minimum(at + 1, others)
    if SEES == 2:
        return tl.minimum(at, others), none + others
    return none, none + others


@kernel()
def bounds_of(first, end, COLUMNS: tl.constexpr):
    """Of tiles of COLUMNS over what some places see from `first` to `end`: where they start, where
    those begin that all of the places see whole, where these end, and where all end."""
    start, stop = tl.min(first, 0) // COLUMNS * COLUMNS, tl.max(end, 0)
    inner = tl.minimum(tl.cdiv(tl.max(first, 0), COLUMNS) * COLUMNS, tl.maximum(start, stop))
    outer = tl.maximum(tl.min(end, 0) // COLUMNS * COLUMNS, inner)
    return start, inner, outer, stop


@kernel()
def tile_of(
    ptr, stride, row, rows, width, MASKED: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr
):
    """Rows `row` of a head [rows, width], WIDTH wide with zeros past the end.

    MASKED where a row may be past the end, EVEN where width is WIDTH.
    """
    d = tl.arange(0, WIDTH)[None, :]
    at = ptr + row.to(tl.int64)[:, None] * stride + d
    if MASKED and EVEN:
        return tl.load(at, mask=(row < rows)[:, None], other=0.0)
    if MASKED:
        return tl.load(at, mask=(row < rows)[:, None] & (d < width), other=0.0)
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=d < width, other=0.0)


def strides(x: Tensor) -> tuple[int, int, int]:
    """The strides of sequences, heads and tokens of x [b, h, n, d], whose d is contiguous."""
    assert x.stride(3) == 1, f"strides {x.stride()}"
    return x.stride()[:3]


def rowwise(x: Tensor) -> Tensor:
    """x [b, h, n, d], copied where its last dimension is not contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def empty_by_token(x: Tensor) -> Tensor:
    """Uninitialised [b, h, n, d] like x, in memory [b, n, h, d], as the next layer reads it."""
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d).transpose(1, 2)


def sizes_and_flags(q: Tensor, k: Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """(sizes h, g, n, m, d, itemsize; constants) that every kernel is given."""
    d, width = q.shape[3], max(16, power_of_two(q.shape[3]))
    flags = {"EVEN": d == width, "WIDTH": width, "PRECISION": float32_precision()}
    return (q.shape[1], k.shape[1], q.shape[2], k.shape[2], d, q.element_size()), flags


def span_arguments(
    causal: bool, first: Tensor | None, end: Tensor | None, like: Tensor
) -> tuple[int, tuple[Tensor, Tensor], int]:
    """(which keys a query sees, `first` and `end` or a dummy for each, their sequence stride)."""
    if first is None or end is None:
        return CAUSAL if causal else ALL, (like, like), 0
    first, end = first.contiguous(), end.contiguous()
    return SPANS, (first, end), first.shape[1] if len(first) > 1 else 0
