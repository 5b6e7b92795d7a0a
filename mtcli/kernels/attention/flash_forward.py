"""FlashAttention-2's forward (arXiv:2307.08691): output and log-sum-exp, with no [n, m] tensor.

b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width.
`attention.py` has the references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mtcli.kernels.attention.flash_backward import flash_backward
from mtcli.kernels.attention.sinks import sinks_gradient
from mtcli.kernels.attention.tiles import (
    RANGES,
    config,
    contiguous_rows,
    empty_by_token,
    head_at,
    head_grid,
    key_range_of,
    load_tile,
    loop_bounds,
    offset_of,
    program_of,
    range_arguments,
    score_scales,
    sizes_and_flags,
    store_tile,
    strides,
)
from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.softcap import bent
from mtcli.kernels.triton_launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


CONFIGS = (
    config(128, 128, 8, 3), config(128, 128, 8, 2), config(128, 64, 8, 3), config(128, 64, 4, 3),
    config(128, 32, 8, 2), config(64, 64, 4, 3), config(64, 64, 4, 2), config(64, 32, 4, 2),
    config(32, 32, 4, 2), config(16, 32, 8, 2), config(16, 32, 4, 2),
)  # fmt: skip


def forward_config(d: int, itemsize: int, mask: int, capped: bool) -> dict[str, int]:
    """The default config, which fits in the 163 KiB of compute capability 8.0."""
    if itemsize == 4:
        if d <= 64:
            return config(64, 32, 4, 2)
        return config(16, 32, 4 if d <= 128 else 8, 2)
    if d <= 128 and mask == RANGES:  # a short range fills few tiles
        return config(64, 64, 4, 2)
    if d <= 64:
        return config(128, 64, 4, 3)
    return config(128, 64, 8, 3) if d <= 128 else config(128, 32, 8, 2)


@kernel()
def _add_keys(
    top, sums, mixed, q, k_ptr, v_ptr, k_stride, v_stride, start, stop, inner, outer, m, d, first,
    end, scale, bend, MASKED: tl.constexpr, CAPPED: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys start .. stop - 1; MASKED where ranges end among them.

    CAPPED where scores are tanh(bend * q k^T), and else q k^T; they are multiplied by `scale`.
    Of wide heads only tiles outside inner .. outer - 1 are masked then, by a branch.
    """
    for begin in range(start, stop, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        k = load_tile(k_ptr, k_stride, column, m, d, MASKED, UNIT, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = bent(scores, bend, CAPPED)
        hidden = MASKED
        if MASKED and WIDTH > 128:
            hidden = (begin < inner) | (begin >= outer)
        if hidden:
            visible = (column[None, :] >= first[:, None]) & (column[None, :] < end[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        # One multiply-add per score.
        p, shrink = tl.exp2(scores * scale - base[:, None]), tl.exp2(top - base)
        v = load_tile(v_ptr, v_stride, column, m, d, MASKED, UNIT, WIDTH)
        mixed = tl.dot(p.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
        sums = sums * shrink + tl.sum(p, 1)
        top = higher
    return top, sums, mixed


@kernel(CONFIGS, key=["d", "itemsize", "MASK", "CAPPED"], default=forward_config)
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, first_ptr, end_ptr, sinks_ptr, h, g, n, m, d, itemsize,
    range_b, scale, bend, qb: tl.int64, qh: tl.int64, qn, kb: tl.int64, kh: tl.int64, kn,
    vb: tl.int64, vh: tl.int64, vn, MASK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [b, n, h, d], lse [b, h, n]; `range_b` is 0 where all sequences share their ranges."""
    tile, b, head = program_of(n, h, ROWS)
    # The last queries first: under a causal mask they take longest.
    row = (tl.cdiv(n, ROWS) - 1 - tile) * ROWS + tl.arange(0, ROWS)
    q = load_tile(head_at(q_ptr, b, head, qb, qh, UNIT), qn, row, n, d, True, UNIT, WIDTH)
    group = head // (h // g)
    k_ptr, v_ptr = head_at(k_ptr, b, group, kb, kh, UNIT), head_at(v_ptr, b, group, vb, vh, UNIT)
    first, end = key_range_of(first_ptr + b * range_b, end_ptr + b * range_b, row, n, m, MASK)
    start, inner, outer, stop = loop_bounds(first, end, COLUMNS)
    top, sums = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    if SINKS:  # a key that every query has seen, whose value is 0
        sink = tl.load(sinks_ptr + b * h + head).to(tl.float32) * 1.4426950408889634
        top, sums = tl.zeros((ROWS,), tl.float32) + sink, tl.full((ROWS,), 1.0, tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    # Three loops take more registers than wide heads leave.
    if WIDTH > 128:
        top, sums, mixed = _add_keys(
            top, sums, mixed, q, k_ptr, v_ptr, kn, vn, start, stop, inner, outer, m, d, first, end,
            scale, bend, True, CAPPED, UNIT, PRECISION, WIDTH, COLUMNS,
        )  # fmt: skip
    else:
        top, sums, mixed = _add_keys(
            top, sums, mixed, q, k_ptr, v_ptr, kn, vn, start, inner, inner, outer, m, d, first, end,
            scale, bend, True, CAPPED, UNIT, PRECISION, WIDTH, COLUMNS,
        )  # fmt: skip
        top, sums, mixed = _add_keys(
            top, sums, mixed, q, k_ptr, v_ptr, kn, vn, inner, outer, inner, outer, m, d, first, end,
            scale, bend, False, CAPPED, UNIT, PRECISION, WIDTH, COLUMNS,
        )  # fmt: skip
        top, sums, mixed = _add_keys(
            top, sums, mixed, q, k_ptr, v_ptr, kn, vn, outer, stop, inner, outer, m, d, first, end,
            scale, bend, True, CAPPED, UNIT, PRECISION, WIDTH, COLUMNS,
        )  # fmt: skip
    some = sums > 0.0
    lse = tl.where(some, (top + tl.log2(tl.where(some, sums, 1.0))) * 0.6931471805599453, top)
    tl.store(lse_ptr + (b * h + head) * n + row, lse, mask=row < n)
    mixed /= tl.where(some, sums, 1.0)[:, None]
    out_ptr += offset_of(b * n * h + head, d, UNIT)
    store_tile(out_ptr, h * d, row, n, d, mixed, UNIT, WIDTH)


def _gradients(grad, _, q, k, v, out, lse, causal, first, end, cap, sinks):
    """Gradients of q, k, v and sinks; the four options have none."""
    of_heads = flash_backward(grad, q, k, v, out, lse, causal, first, end, cap)
    return (*of_heads, *[None] * 4, sinks_gradient(grad, out, lse, sinks))


@custom_op(
    "flash(Tensor q, Tensor k, Tensor v, bool causal, Tensor? first, Tensor? end, float cap=0.0,"
    " Tensor? sinks=None) -> (Tensor, Tensor)",
    fake=lambda q, *inputs: (empty_by_token(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
    saved=lambda outputs, q, k, v, *options: (q, k, v, *outputs, *options),
    backward=_gradients,
)
def flash(q, k, v, causal, first, end, cap=0.0, sinks=None):
    """(output [b, h, n, d], log-sum-exp [b, h, n]) of attention; `first` and `end` are key ranges,
    a `cap` above 0 caps scores, and `sinks` [b, h] join softmaxes.

    Scores and probabilities are never in memory: q, k, v, output and log-sum-exp are saved for
    backward.
    """
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    b, h, n, d = q.shape
    out, lse = empty_by_token(q), q.new_empty(b, h, n, dtype=torch.float32)
    sizes, flags = sizes_and_flags(q, k, v)
    mask, ranges, range_b = range_arguments(causal, first, end, q)
    pointers = (q, k, v, out, lse, *ranges, lse if sinks is None else sinks.contiguous())
    layout, kinds = (*strides(q), *strides(k), *strides(v)), (mask, cap > 0, sinks is not None)
    _forward[head_grid(n, b * h)](
        *pointers, *sizes, range_b, *score_scales(d, cap), *layout, *kinds, **flags
    )
    return out, lse
