"""Attention with its log-sum-exp, in tiles that never hold all scores (arXiv:2307.08691).

b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width.
`attention.py` has the references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtcli.kernels.flash_backward import flash_backward
from mtcli.kernels.flash_parts import (
    LOG2_E,
    TILES,
    bounds_of,
    empty_by_token,
    program_of,
    programs,
    rowwise,
    sizes_and_flags,
    span_arguments,
    span_of,
    strides,
    tile_of,
)
from mtcli.kernels.launch import kernel, operator

if TYPE_CHECKING:
    import triton.language as tl


def forward_tile(d: int, itemsize: int) -> dict[str, int]:
    """What is launched where nothing was measured: it fits in 227 KiB of shared memory."""
    return TILES[5 if d * itemsize > 512 else 4 if itemsize == 4 else 1 if d > 64 else 2]


@kernel()
def _mix(
    top, sums, mixed, q, k_ptr, v_ptr, k_stride, v_stride, start, stop, m, d, first, end, scale,
    MASKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip  # takes in keys start .. stop - 1; MASKED: some are not seen
    for begin in range(start, stop, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        k = tile_of(k_ptr, k_stride, column, m, d, MASKED, EVEN, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            seen = (column[None, :] >= first[:, None]) & (column[None, :] < end[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        v = tile_of(v_ptr, v_stride, column, m, d, MASKED, EVEN, WIDTH)
        mixed = tl.dot(p.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
        sums = sums * shrink + tl.sum(p, 1)
        top = higher
    return top, sums, mixed


@kernel(TILES, key=["d", "itemsize"], default=forward_tile)
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, first_ptr, end_ptr, h, g, n, m, d, itemsize, spans,
    scale, qb: tl.int64, qh: tl.int64, qn, kb: tl.int64, kh: tl.int64, kn,
    vb: tl.int64, vh: tl.int64, vn, SEES: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip  # out [b, n, h, d], lse [b, h, n]; `spans` is 0 where all rows share theirs
    tile, b, head = program_of(n, h, ROWS)
    row = (tl.cdiv(n, ROWS) - 1 - tile) * ROWS + tl.arange(0, ROWS)  # the longest first
    q = tile_of(q_ptr + b * qb + head * qh, qn, row, n, d, True, EVEN, WIDTH)
    k_ptr, v_ptr = k_ptr + b * kb + head // (h // g) * kh, v_ptr + b * vb + head // (h // g) * vh
    first, end = span_of(first_ptr + b * spans, end_ptr + b * spans, row, n, m, SEES)
    start, inner, outer, stop = bounds_of(first, end, COLUMNS)
    top, sums = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    top, sums, mixed = _mix(
        top, sums, mixed, q, k_ptr, v_ptr, kn, vn, start, inner, m, d, first, end, scale,
        True, EVEN, PRECISION, WIDTH, COLUMNS,
    )  # fmt: skip
    top, sums, mixed = _mix(
        top, sums, mixed, q, k_ptr, v_ptr, kn, vn, inner, outer, m, d, first, end, scale,
        False, EVEN, PRECISION, WIDTH, COLUMNS,
    )  # fmt: skip
    top, sums, mixed = _mix(
        top, sums, mixed, q, k_ptr, v_ptr, kn, vn, outer, stop, m, d, first, end, scale,
        True, EVEN, PRECISION, WIDTH, COLUMNS,
    )  # fmt: skip
    some = sums > 0.0
    lse = tl.where(some, (top + tl.log2(tl.where(some, sums, 1.0))) * 0.6931471805599453, top)
    tl.store(lse_ptr + (b * h + head) * n + row, lse, mask=row < n)
    column = tl.arange(0, WIDTH)[None, :]
    at = out_ptr + ((b * n + row)[:, None] * h + head) * d + column
    mixed /= tl.where(some, sums, 1.0)[:, None]
    tl.store(at, mixed, mask=(row < n)[:, None] & (column < d))


def _run(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, first: Tensor | None, end: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, k, v = (rowwise(x) for x in (q, k, v))
    b, h, n, d = q.shape
    out, lse = empty_by_token(q), q.new_empty(b, h, n, dtype=torch.float32)
    sizes, flags = sizes_and_flags(q, k)
    sees, lists, spans = span_arguments(causal, first, end, q)
    pointers = (q, k, v, out, lse, *lists)
    layout = (*strides(q), *strides(k), *strides(v))
    _forward[programs(n, b * h)](
        *pointers, *sizes, spans, d**-0.5 * LOG2_E, *layout, SEES=sees, **flags
    )
    return out, lse


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, first, end = inputs
    ctx.save_for_backward(q, k, v, *output, first, end)


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, first, end = ctx.saved_tensors
    parts = flash_backward(grad, *saved, ctx.causal, first, end)
    return *parts, None, None, None


flash = operator(
    "flash(Tensor q, Tensor k, Tensor v, bool causal, Tensor? first, Tensor? end)"
    " -> (Tensor, Tensor)",
    _run,
    lambda q, *others: (empty_by_token(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
    _gradient,
    _keep,
)
