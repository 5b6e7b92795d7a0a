"""FlashAttention's backward (arXiv:2205.14135, appendix B.4): a kernel for dq, one for dk and dv.

Each recomputes probabilities from the log-sum-exp, so that no gradient is added atomically. That
takes 7 GEMMs, where atomics need 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels.attention.tiles import (
    CAUSAL,
    CAUSAL_FROM_KEY,
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
from mtcli.kernels.softcap import bent, through_bend
from mtcli.kernels.triton_launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


CONFIGS = (
    config(128, 64, 8, 3), config(128, 64, 8, 2), config(128, 32, 8, 2), config(64, 64, 8, 2),
    config(64, 64, 4, 3), config(64, 64, 4, 2), config(64, 64, 4, 1), config(64, 32, 8, 2),
    config(64, 32, 4, 2), config(32, 32, 8, 2), config(32, 32, 4, 2), config(16, 32, 8, 2),
    config(16, 32, 4, 2),
)  # fmt: skip


def dq_config(d: int, itemsize: int, mask: int, capped: bool) -> dict[str, int]:
    """The default config of `_dq`, which fits in the 163 KiB of compute capability 8.0."""
    if itemsize == 4:
        if d <= 64:
            return config(32, 32, 4, 2)
        return config(16, 32, 4, 2) if d <= 128 else config(32, 32, 8, 2)
    if d > 128:
        return config(64, 32, 8, 2)
    if mask == RANGES or capped:  # a short range fills few tiles, and caps take registers
        return config(64, 64, 4, 2)
    return config(64, 64, 4, 3) if d <= 64 else config(128, 64, 8, 3)


def dkv_config(d: int, itemsize: int, mask: int, capped: bool) -> dict[str, int]:
    """The default config of `_dkv`, whose programs hold two gradients."""
    if itemsize == 4:
        if d <= 64:
            return config(32, 32, 4, 2)
        return config(32, 32, 8, 2) if d <= 128 else config(16, 32, 8, 2)
    if capped and 32 < d <= 128:  # caps take registers
        return config(64, 32, 4, 2)
    return config(64, 64, 4, 1) if d <= 128 else config(64, 32, 8, 2)


@kernel()
def _add_dq(
    dq, q, grad, lse, delta, k_ptr, v_ptr, k_stride, v_stride, start, stop, m, d, first, end,
    scale, bend, MASKED: tl.constexpr, CAPPED: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dq with what keys start .. stop - 1 add to it."""
    for begin in range(start, stop, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        k = load_tile(k_ptr, k_stride, column, m, d, MASKED, UNIT, WIDTH)
        v = load_tile(v_ptr, v_stride, column, m, d, MASKED, UNIT, WIDTH)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = bent(s, bend, CAPPED)
        p = tl.exp2(s * scale - lse[:, None])
        if MASKED:
            visible = (column[None, :] >= first[:, None]) & (column[None, :] < end[:, None])
            p = tl.where(visible, p, 0.0)
        p = through_bend(p, s, CAPPED)
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@kernel()
def _gemm_by_columns(
    a_ptr, b_ptr, a_stride, b_stride, a_row, b_row, a_rows, b_rows, d, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """a b^T of rows of two heads, 32 columns at a time: whole rows would take all registers."""
    total = tl.zeros((a_row.shape[0], b_row.shape[0]), tl.float32)
    for done in range(0, WIDTH, 32):
        a = load_tile(a_ptr + done, a_stride, a_row, a_rows, d - done, True, UNIT, 32)
        b = load_tile(b_ptr + done, b_stride, b_row, b_rows, d - done, True, UNIT, 32)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@kernel()
def _add_dq_by_columns(
    dq, q_ptr, grad_ptr, q_stride, grad_stride, row, n, lse, delta, k_ptr, v_ptr, k_stride,
    v_stride, start, stop, m, d, first, end, scale, bend, CAPPED: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`_add_dq` of wide float32 heads, always masked."""
    for begin in tl.range(start, stop, COLUMNS, disable_licm=True):
        column = begin + tl.arange(0, COLUMNS)
        s = _gemm_by_columns(
            q_ptr, k_ptr, q_stride, k_stride, row, column, n, m, d, UNIT, PRECISION, WIDTH
        )  # fmt: skip
        dp = _gemm_by_columns(
            grad_ptr, v_ptr, grad_stride, v_stride, row, column, n, m, d, UNIT, PRECISION, WIDTH
        )  # fmt: skip
        visible = (column[None, :] >= first[:, None]) & (column[None, :] < end[:, None])
        s = bent(s, bend, CAPPED)
        p = tl.where(visible, tl.exp2(s * scale - lse[:, None]), 0.0)
        k = load_tile(k_ptr, k_stride, column, m, d, True, UNIT, WIDTH)
        ds = through_bend(p, s, CAPPED) * (dp - delta[:, None])
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@kernel(CONFIGS, key=["d", "itemsize", "MASK", "CAPPED"], default=dq_config)
def _dq(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, first_ptr, end_ptr, delta_ptr, dq_ptr,
    h, g, n, m, d, itemsize, range_b, scale, bend, shrink, qb: tl.int64, qh: tl.int64, qn,
    kb: tl.int64, kh: tl.int64, kn, vb: tl.int64, vh: tl.int64, vn, ob: tl.int64, oh: tl.int64, on,
    gb: tl.int64, gh: tl.int64, gn, MASK: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """dq [b, n, h, d]; delta [b, h, n] is the sum of grad * out, for _dkv.

    SPLIT where the GEMMs over the width go by columns: float32 heads wider than 128.
    """
    tile, b, head = program_of(n, h, ROWS)
    # The last queries first: under a causal mask they take longest.
    row = (tl.cdiv(n, ROWS) - 1 - tile) * ROWS + tl.arange(0, ROWS)
    q_ptr = head_at(q_ptr, b, head, qb, qh, UNIT)
    grad_ptr = head_at(grad_ptr, b, head, gb, gh, UNIT)
    grad = load_tile(grad_ptr, gn, row, n, d, True, UNIT, WIDTH)
    out = load_tile(head_at(out_ptr, b, head, ob, oh, UNIT), on, row, n, d, True, UNIT, WIDTH)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + (b * h + head) * n + row, delta, mask=row < n)
    lse = tl.load(lse_ptr + (b * h + head) * n + row, mask=row < n, other=0.0)
    # -inf of a query that attends to no key would give NaN.
    lse = tl.maximum(lse, -1e30) * 1.4426950408889634
    group = head // (h // g)
    k_ptr, v_ptr = head_at(k_ptr, b, group, kb, kh, UNIT), head_at(v_ptr, b, group, vb, vh, UNIT)
    first, end = key_range_of(first_ptr + b * range_b, end_ptr + b * range_b, row, n, m, MASK)
    start, inner, outer, stop = loop_bounds(first, end, COLUMNS)
    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    if SPLIT:
        dq = _add_dq_by_columns(
            dq, q_ptr, grad_ptr, qn, gn, row, n, lse, delta, k_ptr, v_ptr, kn, vn, start, stop, m,
            d, first, end, scale, bend, CAPPED, UNIT, PRECISION, WIDTH, COLUMNS,
        )  # fmt: skip
    else:
        q = load_tile(q_ptr, qn, row, n, d, True, UNIT, WIDTH)
        dq = _add_dq(
            dq, q, grad, lse, delta, k_ptr, v_ptr, kn, vn, start, inner, m, d, first, end, scale,
            bend, True, CAPPED, UNIT, PRECISION, WIDTH, COLUMNS,
        )  # fmt: skip
        dq = _add_dq(
            dq, q, grad, lse, delta, k_ptr, v_ptr, kn, vn, inner, outer, m, d, first, end, scale,
            bend, False, CAPPED, UNIT, PRECISION, WIDTH, COLUMNS,
        )  # fmt: skip
        dq = _add_dq(
            dq, q, grad, lse, delta, k_ptr, v_ptr, kn, vn, outer, stop, m, d, first, end, scale,
            bend, True, CAPPED, UNIT, PRECISION, WIDTH, COLUMNS,
        )  # fmt: skip
    dq_ptr += offset_of(b * n * h + head, d, UNIT)
    store_tile(dq_ptr, h * d, row, n, d, dq * shrink, UNIT, WIDTH)


@kernel(CONFIGS, key=["d", "itemsize", "MASK", "CAPPED"], default=dkv_config)
def _dkv(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, end_ptr, dk_ptr, dv_ptr,
    h, g, n, m, d, itemsize, range_b, scale, bend, shrink, qb: tl.int64, qh: tl.int64, qn,
    kb: tl.int64, kh: tl.int64, kn, vb: tl.int64, vh: tl.int64, vn, gb: tl.int64, gh: tl.int64, gn,
    MASK: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dk and dv [b, m, g, d], summed over a group's query heads; ROWS are keys, COLUMNS queries."""
    tile, b, group = program_of(m, g, ROWS)
    row = tile * ROWS + tl.arange(0, ROWS)
    k_ptr, v_ptr = head_at(k_ptr, b, group, kb, kh, UNIT), head_at(v_ptr, b, group, vb, vh, UNIT)
    if not SPLIT:
        k = load_tile(k_ptr, kn, row, m, d, True, UNIT, WIDTH)
        v = load_tile(v_ptr, vn, row, m, d, True, UNIT, WIDTH)
    first, end = key_range_of(first_ptr + b * range_b, end_ptr + b * range_b, row, m, n, MASK)
    start, inner, outer, stop = loop_bounds(first, end, COLUMNS)
    # first <= query < end is one comparison of unsigned numbers.
    num_visible = tl.maximum(end - first, 0).to(tl.uint32)
    dk, dv = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    # Without hoisting: the addresses of a head's first tile would be spilled, 88 bytes a thread.
    for head in tl.range(group * (h // g), (group + 1) * (h // g), disable_licm=True):
        q_at = head_at(q_ptr, b, head, qb, qh, UNIT)
        grad_at = head_at(grad_ptr, b, head, gb, gh, UNIT)
        row_at = (b * h + head) * n
        # One loop with a branch for the mask: of three loops the addresses would be spilled.
        for begin in tl.range(start, stop, COLUMNS, disable_licm=SPLIT):
            query = begin + tl.arange(0, COLUMNS)
            if SPLIT:
                s = _gemm_by_columns(
                    k_ptr, q_at, kn, qn, row, query, m, n, d, UNIT, PRECISION, WIDTH
                )
                dp = _gemm_by_columns(
                    v_ptr, grad_at, vn, gn, row, query, m, n, d, UNIT, PRECISION, WIDTH
                )
            q = load_tile(q_at, qn, query, n, d, True, UNIT, WIDTH)
            grad = load_tile(grad_at, gn, query, n, d, True, UNIT, WIDTH)
            lse = tl.load(lse_ptr + row_at + query, mask=query < n, other=0.0)
            # Late, as one register of each query less: but at 64 sm_80 spills 4 B early, 48 late.
            if WIDTH == 64:
                delta = tl.load(delta_ptr + row_at + query, mask=query < n, other=0.0)
            lse = tl.maximum(lse, -1e30) * 1.4426950408889634
            if not SPLIT:
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            s = bent(s, bend, CAPPED)
            p = tl.exp2(s * scale - lse[None, :])
            if (begin < inner) | (begin >= outer):
                visible = (query[None, :] - first[:, None]).to(tl.uint32) < num_visible[:, None]
                p = tl.where(visible, p, 0.0)
            bent_p = through_bend(p, s, CAPPED)
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
            if not SPLIT:
                dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            if WIDTH != 64:
                delta = tl.load(delta_ptr + row_at + query, mask=query < n, other=0.0)
            ds = bent_p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    # Rows counted from the tile's first: their numbers need no register during the loop.
    at = offset_of((b * m + tile * ROWS) * g + group, d, UNIT)
    rows, left = tl.arange(0, ROWS), m - tile * ROWS
    store_tile(dk_ptr + at, g * d, rows, left, d, dk * shrink, UNIT, WIDTH)
    store_tile(dv_ptr + at, g * d, rows, left, d, dv, UNIT, WIDTH)


@custom_op(
    "flash_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal,"
    " Tensor? first, Tensor? end, float cap=0.0) -> (Tensor, Tensor, Tensor)",
    fake=lambda grad, *inputs: tuple(empty_by_token(x) for x in inputs[:3]),
)
def flash_backward(grad, q, k, v, out, lse, causal, first, end, cap=0.0):
    """(dq, dk, dv) of a block of keys, given the output and log-sum-exp over all keys."""
    grad, q, k, v, out = (contiguous_rows(x) for x in (grad, q, k, v, out))
    (b, h, n, d), (_, g, m, _), lse = q.shape, k.shape, lse.contiguous()
    dq, dk, dv = (empty_by_token(x) for x in (q, k, v))
    delta, (sizes, flags) = torch.empty_like(lse), sizes_and_flags(q, k, v, out, grad)
    flags["SPLIT"] = q.element_size() == 4 and d > 128
    mask, ranges, range_b = range_arguments(causal, first, end, q)
    scales, layout = (*score_scales(d, cap), d**-0.5), (*strides(q), *strides(k), *strides(v))
    _dq[head_grid(n, b * h)](
        q, k, v, out, grad, lse, *ranges, delta, dq, *sizes, range_b, *scales, *layout,
        *strides(out), *strides(grad), mask, cap > 0, **flags,
    )  # fmt: skip
    if mask == CAUSAL:
        mask = CAUSAL_FROM_KEY
    elif mask == RANGES:
        ranges, range_b = _query_ranges(*ranges, m), m if range_b else 0
    _dkv[head_grid(m, b * g)](
        q, k, v, grad, lse, delta, *ranges, dk, dv, *sizes, range_b, *scales, *layout,
        *strides(grad), mask, cap > 0, **flags,
    )  # fmt: skip
    return dq, dk, dv


def _query_ranges(first: Tensor, end: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The queries that attend to each key, as ranges: first and end [b, n] -> [b, m]."""
    places = torch.arange(keys, device=first.device, dtype=first.dtype)
    places = places.expand(len(first), keys).contiguous()
    return (
        torch.searchsorted(end.contiguous(), places, right=True, out_int32=True),
        torch.searchsorted(first.contiguous(), places, right=True, out_int32=True),
    )
