"""`permute`, `unpermute` and `reorder` by torch's functions, keeping little for their backwards.

So they are on a CPU, and in float64. Left to autograd, `index_copy` and `index_add` keep the rows
that they copy or add, which no gradient reads: C * D numbers each. Here indices are kept, and the
rows that weights multiply. T tokens of D; C copies in N rows.
"""

from typing import Any, cast

import torch
from torch import Tensor

from mtcli.kernels.copies import Copies


def permute_by_torch(x_TD: Tensor, copies: Copies, num_rows: int) -> Tensor:
    """[T, D] -> rows [N, D]."""
    assert copies.order is not None, "sorted for our kernels"
    token_C = copies.order // copies.top_k
    return cast(Tensor, _Spread.apply(x_TD, token_C, copies.padded_places, num_rows))


def unpermute_by_torch(rows_ND: Tensor, weights_Tk: Tensor, copies: Copies) -> Tensor:
    """The sum of each token's rows, times their weights: [N, D], [T, k] -> [T, D]."""
    assert copies.order is not None, "sorted for our kernels"
    token_C, slot_C = copies.order // copies.top_k, copies.order % copies.top_k
    weight_C = weights_Tk[token_C, slot_C].to(rows_ND.dtype)
    places, tokens = copies.padded_places, len(weights_Tk)
    return cast(Tensor, _WeighedSum.apply(rows_ND, weight_C, token_C, places, tokens))


def reorder_by_torch(rows_ND: Tensor, order_N: Tensor) -> Tensor:
    """rows_ND[order_N], a permutation."""
    return cast(Tensor, _Reordered.apply(rows_ND, order_N))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_C: Tensor, places: Tensor | None, n: int) -> Tensor:
        ctx.save_for_backward(token_C, places)
        ctx.tokens = len(x_TD)
        return _placed(x_TD[token_C], places, n)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        token_C, places = ctx.saved_tensors
        return _summed(_taken(grad_ND, places), token_C, ctx.tokens), None, None, None


class _WeighedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, weight_C: Tensor, token_C: Tensor, places: Tensor | None, t: int
    ) -> Tensor:
        ctx.save_for_backward(rows_ND, weight_C, token_C, places)
        return _summed(_taken(rows_ND, places) * weight_C[:, None], token_C, t)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows_ND, weight_C, token_C, places = ctx.saved_tensors
        grad_CD = grad_TD[token_C]
        of_weight = (grad_CD * _taken(rows_ND, places)).sum(-1)
        of_rows = _placed(grad_CD.mul_(weight_C[:, None]), places, len(rows_ND))
        return of_rows, of_weight, None, None, None


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        return rows_ND[order_N]

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        (order_N,) = ctx.saved_tensors
        return torch.empty_like(grad_ND).index_copy_(0, order_N, grad_ND), None


def _placed(copies_CD: Tensor, places: Tensor | None, n: int) -> Tensor:
    if places is None:
        return copies_CD
    return copies_CD.new_zeros(n, copies_CD.shape[1]).index_copy_(0, places, copies_CD)


def _taken(rows_ND: Tensor, places: Tensor | None) -> Tensor:
    return rows_ND if places is None else rows_ND[places]


def _summed(copies_CD: Tensor, token_C: Tensor, t: int) -> Tensor:
    return copies_CD.new_zeros(t, copies_CD.shape[1]).index_add_(0, token_C, copies_CD)
