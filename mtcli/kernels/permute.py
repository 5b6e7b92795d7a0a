"""Token permutation for a mixture of experts: rows sorted by expert, and their weighted sum back.

T tokens of D, k experts per token, E experts. A token has k copies, one per chosen expert, of which
the router keeps C of T * k. They are in N rows, sorted by expert and then by token. With a
`capacity` above 0 every expert has `capacity` rows, padded with zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import cdiv, column_grid, kernel, power_of_two, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 64  # copies that a program counts or places: BLOCK * E comparisons lie in registers
CONFIGS = (
    {"COLUMNS": 1024, "num_warps": 4},
    {"COLUMNS": 512, "num_warps": 4},
    {"COLUMNS": 2048, "num_warps": 8},
)


class TokenPermutation(NamedTuple):
    """The row of each token copy: as `order` for torch's functions, as `places` for Triton
    kernels."""

    counts: Tensor  # [E] int64: the kept copies of each expert
    top_k: int
    capacity: int
    order: Tensor | None  # [C] the copies, of T * k, in the order of their rows
    places: Tensor | None  # [T, k] the row of each copy, -1 of a dropped one
    drops: bool = False  # whether C may be less than T * k

    @property
    def rows(self) -> Tensor:
        """[E] int64: the rows of each expert, including padding."""
        return torch.full_like(self.counts, self.capacity) if self.capacity else self.counts

    @property
    def num_rows(self) -> int:
        """N; the host waits for a GPU where copies may be dropped and rows are not padded."""
        if self.capacity:
            return len(self.counts) * self.capacity
        if self.drops or self.places is None:
            return int(self.counts.sum())
        return self.places.numel()

    @property
    def padded_places(self) -> Tensor | None:
        """[C] int64: the row of each copy in `order`; None where no row is padding."""
        counts, capacity = self.counts, self.capacity
        if not capacity:
            return None
        assert int(counts.max()) <= capacity, f"{int(counts.max())} rows of {capacity}"
        starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        within = torch.arange(int(counts.sum()), device=counts.device) - starts
        experts = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        return experts * capacity + within

    @property
    def tokens(self) -> Tensor:
        """[C] int64: the token of each copy in `order`."""
        assert self.order is not None, "sorted for our kernels"
        return self.order // self.top_k


def sort_copies(
    x_TD: Tensor, experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, capacity: int
) -> TokenPermutation:
    """Sorts the kept copies [T, k] of tokens like x_TD by expert; `kept_Tk` of None keeps all.

    On a GPU it is a counting sort.
    """
    k, drops = experts_Tk.shape[1], kept_Tk is not None
    if runs_triton(x_TD):
        counts, places = _sort(experts_Tk, kept_Tk, num_experts, capacity)
        return TokenPermutation(counts, k, capacity, None, places, drops)
    flat = (experts_Tk.masked_fill(~kept_Tk, num_experts) if drops else experts_Tk).flatten()
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    order = torch.argsort(flat, stable=True)[: int(counts.sum())]
    return TokenPermutation(counts, k, capacity, order, None, drops)


def permute_reference(x_TD: Tensor, copies: TokenPermutation) -> Tensor:
    """Copies tokens to the rows of their experts: [T, D] -> rows [N, D]."""
    rows = x_TD[copies.tokens]
    if not copies.capacity:
        return rows
    padded = rows.new_zeros(len(copies.counts) * copies.capacity, rows.shape[1])
    return padded.index_copy(0, copies.padded_places, rows)


def unpermute_reference(rows_ND: Tensor, weights_Tk: Tensor, copies: TokenPermutation) -> Tensor:
    """Sums each token's rows, times their weights: [N, D], [T, k] -> [T, D]."""
    token_C, slot_C = copies.tokens, copies.order % copies.top_k
    if copies.capacity:
        rows_ND = rows_ND[copies.padded_places]
    weights = weights_Tk[token_C, slot_C].to(rows_ND.dtype)
    empty = rows_ND.new_zeros(len(weights_Tk), rows_ND.shape[1])
    return empty.index_add(0, token_C, rows_ND * weights[:, None])


@kernel()
def _experts_of(
    expert_ptr, kept_ptr, copy, copies, DROPS: tl.constexpr,
):  # fmt: skip
    """The experts of some copies; -1 of a dropped one."""
    inside = copy < copies
    if DROPS:
        inside = inside & (tl.load(kept_ptr + copy, mask=inside, other=0) != 0)
    return tl.load(expert_ptr + copy, mask=inside, other=-1)


@kernel()
def _count(
    expert_ptr, kept_ptr, counts_ptr, copies, experts, blocks,
    DROPS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts [experts, blocks]: the kept copies of each expert in each block of copies."""
    block = tl.program_id(0).to(tl.int64)
    copy, lane = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, E)
    expert = _experts_of(expert_ptr, kept_ptr, copy, copies, DROPS)
    count = tl.sum((expert[:, None] == lane[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + lane.to(tl.int64) * blocks + block, count, mask=lane < experts)


@kernel()
def _place(
    expert_ptr, kept_ptr, ends_ptr, places_ptr, copies, blocks, capacity,
    DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ends [experts, blocks]: the cumulative sum of `_count`'s counts, over all of them."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    copy = block * BLOCK + lane
    expert = _experts_of(expert_ptr, kept_ptr, copy, copies, DROPS)
    is_kept = expert >= 0
    earlier = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
    at = expert * blocks + block  # ends[at - 1] counts the copies that come earlier
    first = tl.load(ends_ptr + at - 1, mask=is_kept & (at > 0), other=0).to(tl.int64)
    if capacity > 0:
        of_others = ends_ptr + expert * blocks - 1
        first += expert * capacity - tl.load(of_others, mask=is_kept & (expert > 0), other=0)
    place = first + tl.sum(earlier.to(tl.int32), 1)
    tl.store(places_ptr + copy, tl.where(is_kept, place, -1), mask=copy < copies)


@kernel(CONFIGS, key=["width"])
def _scatter(x_ptr, places_ptr, out_ptr, width, slots, K: tl.constexpr, COLUMNS: tl.constexpr):
    """A program writes COLUMNS of one token into each of its rows."""
    token = tl.program_id(0).to(tl.int64)
    column, slot = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, K)
    place = tl.load(places_ptr + token * slots + slot, mask=slot < slots, other=-1)
    x = tl.load(x_ptr + token * width + column, mask=column < width, other=0.0)
    inside = (place >= 0)[:, None] & (column < width)[None, :]
    at = out_ptr + place[:, None] * width + column[None, :]
    tl.store(at, tl.broadcast_to(x[None, :], (K, COLUMNS)), mask=inside)


@kernel(CONFIGS, key=["width"])
def _gather(
    rows_ptr, places_ptr, weights_ptr, out_ptr, width, slots,
    WEIGHS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program sums COLUMNS of one token's rows."""
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


@kernel(CONFIGS, key=["width"])
def _gather_backward(
    grad_ptr, rows_ptr, places_ptr, weights_ptr, of_rows_ptr, of_weights_ptr, width, slots,
    K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program takes all columns of a token, as a weight's gradient is a sum over them."""
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


def permute(x_TD: Tensor, copies: TokenPermutation, num_rows: int) -> Tensor:
    """`permute_reference`; N is an argument, so that the host need not wait for a GPU.

    Bytes moved: (1 + k) * T * D * itemsize, forward and backward.
    """
    if copies.places is None:
        return _PermuteFallback.apply(x_TD, copies.tokens, copies.padded_places, num_rows)
    return _spread(x_TD, copies.places, num_rows, copies.capacity == 0)


def unpermute(rows_ND: Tensor, weights_Tk: Tensor, copies: TokenPermutation) -> Tensor:
    """`unpermute_reference`, on a GPU summed in float32 and in a fixed order.

    Bytes moved: (k + 1) * T * D * itemsize forward, (2 k + 1) backward.
    """
    if copies.places is None:
        token_C, slot_C = copies.tokens, copies.order % copies.top_k
        weight_C = weights_Tk[token_C, slot_C].to(rows_ND.dtype)
        return _UnpermuteFallback.apply(
            rows_ND, weight_C, token_C, copies.padded_places, len(weights_Tk)
        )
    return _sum(rows_ND, copies.places, weights_Tk, copies.capacity == 0)


def reorder(rows_ND: Tensor, order_N: Tensor | None) -> Tensor:
    """rows_ND[order_N], a permutation (None: the identity); 2 * N * D * itemsize bytes each way."""
    if order_N is None:
        return rows_ND
    if not runs_triton(rows_ND):
        return _ReorderFallback.apply(rows_ND, order_N)
    return _sum(rows_ND, order_N[:, None], None, True)


@custom_op(
    "sort_copies(Tensor experts, Tensor? kept, int num_experts, int capacity) -> (Tensor, Tensor)",
    fake=lambda experts, is_kept, num_experts, capacity: (
        experts.new_empty(num_experts),
        torch.empty_like(experts, memory_format=torch.contiguous_format),
    ),
)
def _sort(experts, is_kept, num_experts, capacity):
    experts, copies, drops = experts.contiguous(), experts.numel(), is_kept is not None
    pointers = (experts, is_kept.contiguous() if drops else experts)
    blocks, places = cdiv(copies, BLOCK), torch.empty_like(experts)
    counts = experts.new_empty(num_experts, blocks, dtype=torch.int32)
    if blocks:
        flags = {"DROPS": drops, "BLOCK": BLOCK}
        lanes = power_of_two(num_experts)
        _count[(blocks,)](*pointers, counts, copies, num_experts, blocks, E=lanes, **flags)
        # Flat: torch scans an outer dimension by one thread per column, row after row.
        ends = counts.flatten().cumsum(0, dtype=torch.int32)
        _place[(blocks,)](*pointers, ends, places, copies, blocks, capacity, **flags)
    return counts.sum(1), places


# `covers`: every row is some copy's, so that none need be zeroed.
@custom_op(
    "spread(Tensor x, Tensor places, int rows, bool covers) -> Tensor",
    fake=lambda x, places, rows, covers: x.new_empty(rows, x.shape[1]),
    saved=lambda out, x, places, rows, covers: (places, covers),
    backward=lambda grad, places, covers: _sum(grad, places, None, covers),
)
def _spread(x, places, rows, covers):
    x, places = x.contiguous(), places.contiguous()
    (tokens, slots), width = places.shape, x.shape[1]
    out = (x.new_empty if covers else x.new_zeros)(rows, width)
    if tokens:
        _scatter[column_grid(tokens, width)](x, places, out, width, slots, K=power_of_two(slots))
    return out


def _backward_of_sum(
    grad: Tensor,
    rows: Tensor | None,
    num_rows: int,
    places: Tensor,
    weights: Tensor | None,
    covers: bool,
) -> tuple[Tensor | None, ...]:
    if weights is None:
        return (_spread(grad, places, num_rows, covers),)
    of_rows, of_weights = _sum_backward(grad, rows, places, weights, covers)
    return of_rows, None, of_weights


@custom_op(
    "sum_rows(Tensor rows, Tensor places, Tensor? weights, bool covers) -> Tensor",
    fake=lambda rows, places, *inputs: rows.new_empty(len(places), rows.shape[1]),
    saved=lambda out, rows, places, weights, covers: (
        None if weights is None else rows,
        len(rows),
        places,
        weights,
        covers,
    ),
    backward=_backward_of_sum,
)
def _sum(rows, places, weights, covers):
    rows, places, weighs = rows.contiguous(), places.contiguous(), weights is not None
    (tokens, slots), width = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    pointers = (rows, places, weights.contiguous() if weighs else rows, out)
    if tokens:
        _gather[column_grid(tokens, width)](
            *pointers, width, slots, WEIGHS=weighs, K=power_of_two(slots)
        )
    return out


@custom_op(
    "sum_rows_backward(Tensor grad, Tensor rows, Tensor places, Tensor weights, bool covers)"
    " -> (Tensor, Tensor)",
    fake=lambda grad, rows, places, weights, covers: (
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        torch.empty_like(weights, memory_format=torch.contiguous_format),
    ),
)
def _sum_backward(grad, rows, places, weights, covers):
    grad, rows, places, weights = (x.contiguous() for x in (grad, rows, places, weights))
    (tokens, slots), width = places.shape, rows.shape[1]
    of_rows = (torch.empty_like if covers else torch.zeros_like)(rows)
    of_weights = torch.empty_like(weights)
    pointers = (grad, rows, places, weights, of_rows, of_weights)
    if tokens:
        _gather_backward[(tokens,)](*pointers, width, slots, K=power_of_two(slots))
    return of_rows, of_weights


# The fallbacks, on a CPU and in float64. Left to autograd, `index_copy` and `index_add` would save
# the rows that they copy or add, which no gradient reads: C * D numbers each. Here indices are
# saved, and the rows that weights multiply.


class _PermuteFallback(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_C: Tensor, places: Tensor | None, n: int) -> Tensor:
        ctx.save_for_backward(token_C, places)
        ctx.tokens = len(x_TD)
        return _scattered(x_TD[token_C], places, n)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        token_C, places = ctx.saved_tensors
        return _summed(_gathered(grad_ND, places), token_C, ctx.tokens), None, None, None


class _UnpermuteFallback(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, weight_C: Tensor, token_C: Tensor, places: Tensor | None, t: int
    ) -> Tensor:
        ctx.save_for_backward(rows_ND, weight_C, token_C, places)
        return _summed(_gathered(rows_ND, places) * weight_C[:, None], token_C, t)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows_ND, weight_C, token_C, places = ctx.saved_tensors
        grad_CD = grad_TD[token_C]
        of_weight = (grad_CD * _gathered(rows_ND, places)).sum(-1)
        of_rows = _scattered(grad_CD.mul_(weight_C[:, None]), places, len(rows_ND))
        return of_rows, of_weight, None, None, None


class _ReorderFallback(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        return rows_ND[order_N]

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        (order_N,) = ctx.saved_tensors
        return torch.empty_like(grad_ND).index_copy_(0, order_N, grad_ND), None


def _scattered(copies_CD: Tensor, places: Tensor | None, n: int) -> Tensor:
    if places is None:
        return copies_CD
    return copies_CD.new_zeros(n, copies_CD.shape[1]).index_copy_(0, places, copies_CD)


def _gathered(rows_ND: Tensor, places: Tensor | None) -> Tensor:
    return rows_ND if places is None else rows_ND[places]


def _summed(copies_CD: Tensor, token_C: Tensor, t: int) -> Tensor:
    return copies_CD.new_zeros(t, copies_CD.shape[1]).index_add_(0, token_C, copies_CD)
