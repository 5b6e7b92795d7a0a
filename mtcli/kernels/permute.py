"""Copies of tokens sorted by expert, and summed again where their experts are done.

T tokens of D, k experts of each, E experts; N rows, those of copies that are kept, sorted by expert
and within one by token. With a `capacity` above 0 every expert has that many rows, the last zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtcli.kernels.copies import Copies
from mtcli.kernels.launch import cdiv, kernel, operator, power_of_two, runs_triton
from mtcli.kernels.permute_by_torch import (
    permute_by_torch,
    reorder_by_torch,
    unpermute_by_torch,
)
from mtcli.kernels.tiles import over_columns

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 64  # copies that a program counts or places: BLOCK * E comparisons lie in registers
TILES = (
    {"COLUMNS": 1024, "num_warps": 4},
    {"COLUMNS": 512, "num_warps": 4},
    {"COLUMNS": 2048, "num_warps": 8},
)


def sort_copies(
    x_TD: Tensor, experts_Tk: Tensor, kept_Tk: Tensor, num_experts: int, capacity: int
) -> Copies:
    """The kept copies [T, k] of tokens like x_TD, sorted by expert; a counting sort on a GPU."""
    k = experts_Tk.shape[1]
    if runs_triton(x_TD):
        counts, places = _sort(experts_Tk, kept_Tk, num_experts, capacity)
        return Copies(counts, k, capacity, None, places)
    flat = experts_Tk.masked_fill(~kept_Tk, num_experts).flatten()
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    order = torch.argsort(flat, stable=True)[: int(counts.sum())]
    return Copies(counts, k, capacity, order, None)


def permute_reference(x_TD: Tensor, copies: Copies) -> Tensor:
    """[T, D] -> rows [N, D]."""
    assert copies.order is not None, "sorted for our kernels"
    rows = x_TD[copies.order // copies.top_k]
    if not copies.capacity:
        return rows
    padded = rows.new_zeros(len(copies.counts) * copies.capacity, rows.shape[1])
    return padded.index_copy(0, copies.padded_places, rows)


def unpermute_reference(rows_ND: Tensor, weights_Tk: Tensor, copies: Copies) -> Tensor:
    """The sum of each token's rows, times their weights: [N, D], [T, k] -> [T, D]."""
    assert copies.order is not None, "sorted for our kernels"
    if copies.capacity:
        rows_ND = rows_ND[copies.padded_places]
    token, slot = copies.order // copies.top_k, copies.order % copies.top_k
    weights = weights_Tk[token, slot].to(rows_ND.dtype)
    empty = rows_ND.new_zeros(len(weights_Tk), rows_ND.shape[1])
    return empty.index_add(0, token, rows_ND * weights[:, None])


@kernel()
def _count(
    expert_ptr, kept_ptr, counts_ptr, copies, experts, E: tl.constexpr, BLOCK: tl.constexpr
):  # counts [blocks, experts]: the kept copies of each expert in each block of copies
    block = tl.program_id(0).to(tl.int64)
    copy, lane = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, E)
    kept = tl.load(kept_ptr + copy, mask=copy < copies, other=0) != 0
    expert = tl.where(kept, tl.load(expert_ptr + copy, mask=copy < copies, other=0), -1)
    count = tl.sum((expert[:, None] == lane[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * experts + lane, count, mask=lane < experts)


@kernel()
def _place(
    expert_ptr, kept_ptr, first_ptr, places_ptr, copies, experts, BLOCK: tl.constexpr
):  # first [blocks, experts]: the row of an expert's first copy in a block
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    copy = block * BLOCK + lane
    kept = tl.load(kept_ptr + copy, mask=copy < copies, other=0) != 0
    expert = tl.where(kept, tl.load(expert_ptr + copy, mask=copy < copies, other=0), -1)
    earlier = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
    first = tl.load(first_ptr + block * experts + expert, mask=kept, other=0)
    place = first + tl.sum(earlier.to(tl.int32), 1)
    tl.store(places_ptr + copy, tl.where(kept, place, -1), mask=copy < copies)


@kernel(TILES, key=["width"])
def _scatter(
    x_ptr, places_ptr, out_ptr, width, slots, K: tl.constexpr, COLUMNS: tl.constexpr
):  # a program writes one token's columns into each of its rows
    token = tl.program_id(0).to(tl.int64)
    column, slot = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, K)
    place = tl.load(places_ptr + token * slots + slot, mask=slot < slots, other=-1)
    x = tl.load(x_ptr + token * width + column, mask=column < width, other=0.0)
    inside = (place >= 0)[:, None] & (column < width)[None, :]
    at = out_ptr + place[:, None] * width + column[None, :]
    tl.store(at, tl.broadcast_to(x[None, :], (K, COLUMNS)), mask=inside)


@kernel(TILES, key=["width"])
def _gather(
    rows_ptr, places_ptr, weights_ptr, out_ptr, width, slots,
    WEIGHS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip  # a program sums columns of one token's rows
    token = tl.program_id(0).to(tl.int64)
    column, slot = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, K)
    place = tl.load(places_ptr + token * slots + slot, mask=slot < slots, other=-1)
    inside = (place >= 0)[:, None] & (column < width)[None, :]
    rows = tl.load(rows_ptr + place[:, None] * width + column[None, :], mask=inside, other=0.0)
    rows = rows.to(tl.float32)
    if WEIGHS:
        weight = tl.load(weights_ptr + token * slots + slot, mask=slot < slots, other=0.0)
        rows *= weight.to(tl.float32)[:, None]
    tl.store(out_ptr + token * width + column, tl.sum(rows, 0), mask=column < width)


@kernel(TILES, key=["width"])
def _gather_backward(
    grad_ptr, rows_ptr, places_ptr, weights_ptr, of_rows_ptr, of_weights_ptr, width, slots,
    K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip  # a program has all columns of a token: a weight's gradient is a sum over them
    token, slot = tl.program_id(0).to(tl.int64), tl.arange(0, K)
    place = tl.load(places_ptr + token * slots + slot, mask=slot < slots, other=-1)
    weight = tl.load(weights_ptr + token * slots + slot, mask=slot < slots, other=0.0)
    weight, of_weight = weight.to(tl.float32), tl.zeros((K,), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (place >= 0)[:, None] & (column < width)[None, :]
        at = place[:, None] * width + column[None, :]
        grad = tl.load(grad_ptr + token * width + column, mask=column < width, other=0.0)
        grad = grad.to(tl.float32)[None, :]
        rows = tl.load(rows_ptr + at, mask=inside, other=0.0).to(tl.float32)
        of_weight += tl.sum(rows * grad, 1)
        tl.store(of_rows_ptr + at, weight[:, None] * grad, mask=inside)
    tl.store(of_weights_ptr + token * slots + slot, of_weight, mask=slot < slots)


def permute(x_TD: Tensor, copies: Copies, num_rows: int) -> Tensor:
    """`permute_reference`; N is given, so that a GPU need not be asked for it.

    Bytes moved: (1 + k) * T * D * itemsize, forward and backward.
    """
    if copies.places is None:
        return permute_by_torch(x_TD, copies, num_rows)
    return _spread(x_TD, copies.places, num_rows, copies.capacity == 0)


def unpermute(rows_ND: Tensor, weights_Tk: Tensor, copies: Copies) -> Tensor:
    """`unpermute_reference`, on a GPU in float32 within, and in an order that never differs.

    Bytes moved: (k + 1) * T * D * itemsize forward, (2 k + 1) backward.
    """
    if copies.places is None:
        return unpermute_by_torch(rows_ND, weights_Tk, copies)
    return _sum(rows_ND, copies.places, weights_Tk, copies.capacity == 0)


def reorder(rows_ND: Tensor, order_N: Tensor | None) -> Tensor:
    """rows_ND[order_N], a permutation (None: the identity); 2 * N * D * itemsize bytes each way."""
    if order_N is None:
        return rows_ND
    if not runs_triton(rows_ND):
        return reorder_by_torch(rows_ND, order_N)
    return _sum(rows_ND, order_N[:, None], None, True)


def _run_sort(
    experts: Tensor, kept: Tensor, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor]:
    experts, kept, copies = experts.contiguous(), kept.contiguous(), experts.numel()
    blocks, places = cdiv(copies, BLOCK), torch.empty_like(experts)
    counts = experts.new_empty(blocks, num_experts, dtype=torch.int32)
    shared = (copies, num_experts)
    if blocks:
        _count[(blocks,)](experts, kept, counts, *shared, E=power_of_two(num_experts), BLOCK=BLOCK)
    totals = counts.sum(0)
    first = counts.cumsum(0) - counts
    if capacity:
        first += torch.arange(num_experts, device=experts.device) * capacity
    else:
        first += totals.cumsum(0) - totals
    if blocks:
        _place[(blocks,)](experts, kept, first, places, *shared, BLOCK=BLOCK)
    return totals, places


def _run_spread(x: Tensor, places: Tensor, rows: int, covers: bool) -> Tensor:
    """`covers`: every row has a copy, so none need be zeroed."""
    x, places = x.contiguous(), places.contiguous()
    (tokens, slots), width = places.shape, x.shape[1]
    out = (x.new_empty if covers else x.new_zeros)(rows, width)
    if tokens:
        _scatter[over_columns(tokens, width)](x, places, out, width, slots, K=power_of_two(slots))
    return out


def _run_sum(rows: Tensor, places: Tensor, weights: Tensor | None, covers: bool) -> Tensor:
    rows, places, weighs = rows.contiguous(), places.contiguous(), weights is not None
    (tokens, slots), width = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    pointers = (rows, places, weights.contiguous() if weighs else rows, out)
    if tokens:
        _gather[over_columns(tokens, width)](
            *pointers, width, slots, WEIGHS=weighs, K=power_of_two(slots)
        )
    return out


def _run_sum_backward(
    grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor, covers: bool
) -> tuple[Tensor, Tensor]:
    grad, rows, places, weights = (x.contiguous() for x in (grad, rows, places, weights))
    (tokens, slots), width = places.shape, rows.shape[1]
    of_rows = (torch.empty_like if covers else torch.zeros_like)(rows)
    of_weights = torch.empty_like(weights)
    pointers = (grad, rows, places, weights, of_rows, of_weights)
    if tokens:
        _gather_backward[(tokens,)](*pointers, width, slots, K=power_of_two(slots))
    return of_rows, of_weights


def _keep_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.covers = inputs[3]


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, places, weights, ctx.covers = inputs
    ctx.rows = len(rows)
    ctx.save_for_backward(None if weights is None else rows, places, weights)


def _sum_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, places, weights = ctx.saved_tensors
    if weights is None:
        return _spread(grad, places, ctx.rows, ctx.covers), None, None, None
    of_rows, of_weights = _sum_backward(grad, rows, places, weights, ctx.covers)
    return of_rows, None, of_weights, None


_sort = operator(
    "sort_copies(Tensor experts, Tensor kept, int num_experts, int capacity) -> (Tensor, Tensor)",
    _run_sort,
    lambda experts, kept, num_experts, capacity: (
        experts.new_empty(num_experts),
        torch.empty_like(experts, memory_format=torch.contiguous_format),
    ),
)
_spread = operator(
    "spread(Tensor x, Tensor places, int rows, bool covers) -> Tensor",
    _run_spread,
    lambda x, places, rows, covers: x.new_empty(rows, x.shape[1]),
    lambda ctx, grad: (_sum(grad, *ctx.saved_tensors, None, ctx.covers), None, None, None),
    _keep_spread,
)
_sum_backward = operator(
    "sum_rows_backward(Tensor grad, Tensor rows, Tensor places, Tensor weights, bool covers)"
    " -> (Tensor, Tensor)",
    _run_sum_backward,
    lambda grad, rows, places, weights, covers: (
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        torch.empty_like(weights, memory_format=torch.contiguous_format),
    ),
)
_sum = operator(
    "sum_rows(Tensor rows, Tensor places, Tensor? weights, bool covers) -> Tensor",
    _run_sum,
    lambda rows, places, *others: rows.new_empty(len(places), rows.shape[1]),
    _sum_gradient,
    _keep_sum,
)
