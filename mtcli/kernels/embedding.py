"""Rows of a table, whose gradients are added to the rows of the table's sink.

torch's gradient of a table is a table: for 4096 tokens, a vocabulary of 50304 and D = 768 a core of
an EPYC took 74 ms to make it and 14 ms to add it, and 2.3 ms to add the rows of the tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.gradient_sink import GradientSink
from mtcli.kernels.stored_weight import StoredWeight


def embedding(
    ids_T: Tensor, weight_VD: Tensor | StoredWeight, sink: GradientSink | None = None
) -> Tensor:
    """The rows [T, D] of ids; their gradients are added to a sink, if the table has one."""
    if isinstance(weight_VD, StoredWeight):
        return weight_VD.rows(ids_T)
    if sink is None or sink.row_stride is None:
        return F.embedding(ids_T, weight_VD)
    return _Embedding.apply(ids_T, weight_VD, sink)  # type: ignore[no-untyped-call, no-any-return]  # torch


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight_VD: Tensor, sink: GradientSink) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.sink = sink
        return F.embedding(ids_T, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[None, None, None]:
        (ids_T,) = ctx.saved_tensors
        _add_rows(ctx.sink, ids_T, grad_TD)
        return None, None, None


def _add_rows(sink: GradientSink, ids_T: Tensor, grad_TD: Tensor) -> None:
    """Adds gradients to the rows of ids, always in the same order."""
    blocks_ORD, stride = sink.blocks_ORD, sink.row_stride
    assert stride is not None, "`embedding` has asked"
    if sink.dtype.itemsize < 4:
        grad_TD = _summed(ids_T, grad_TD, sink.rows)
    if sink.begin() == 0:
        blocks_ORD.zero_()
    owners, rows_each, columns = blocks_ORD.shape
    rows_ND = blocks_ORD.as_strided(((owners - 1) * stride + rows_each, columns), (columns, 1))
    at_T, grad_TD = ids_T // rows_each * stride + ids_T % rows_each, grad_TD.to(sink.dtype)
    _add_at_(rows_ND, at_T, grad_TD)


def _summed(ids_T: Tensor, grad_TD: Tensor, rows: int) -> Tensor:
    """The float32 sum of each id's gradients at the first of its places, and zeros at the others:
    a GPU rounds a sum of 16 bits after each term, and loses those below 1/256 of it."""
    places_T = torch.arange(len(ids_T), device=ids_T.device)
    first_V = places_T.new_full((rows,), len(ids_T)).scatter_reduce_(0, ids_T, places_T, "amin")
    sums_TD = grad_TD.new_zeros(grad_TD.shape, dtype=torch.float32)
    _add_at_(sums_TD, first_V[ids_T], grad_TD.float())
    return sums_TD


def _add_at_(rows_ND: Tensor, at_T: Tensor, x_TD: Tensor) -> None:
    if rows_ND.device.type == "cpu":
        rows_ND.index_add_(0, at_T, x_TD)
    else:  # it sorts them, and index_add_ adds in any order
        rows_ND.index_put_((at_T,), x_TD, accumulate=True)
