"""Collectives that torch.compile keeps in its graphs: custom operators with rules for FakeTensor.

An operator takes tensors and plain values alone, so it takes an axis by name and looks it up when
the graph runs, as torch's functional collectives do with process groups. The operators call those
of `collectives.py`, and write to the same flight recorder.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtcli.core.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_in,
    gather_in,
    reduce_scatter,
    scatter_out,
    sum_out,
)
from mtcli.core.parallel.groups import Axis
from mtcli.kernels.custom_op import custom_op

CompiledCollective = Callable[[Tensor, Axis], Tensor]

_axes: dict[str, Axis] = {}  # by name: beside operators, which torch keeps for a process too


def in_graph(collective: CompiledCollective, axis: Axis) -> CompiledCollective:
    """A differentiable collective of `collectives.py` as operators, for one axis."""
    if axis.size == 1:
        return collective
    assert axis.group is not None, "several ranks have a group"
    name, size = f"{axis.name} {axis.group.group_name}", axis.size
    _axes[name] = axis
    apply = _TRANSPOSED[collective].apply
    return lambda x, _: apply(x, name, size)


def _transposing(forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Any:
    """An autograd function whose forward and backward are operators, which dynamo traces."""

    class InGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
            ctx.axis = name, size
            return forward(x, name, size)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            return backward(grad, *ctx.axis), None, None

    return InGraph


def _same(x: Tensor, name: str, size: int) -> Tensor:
    return x.view_as(x)


@custom_op("tp_sum(Tensor x, str axis, int size) -> Tensor")
def _sum(x: Tensor, name: str, size: int) -> Tensor:
    return all_reduce(x.clone(memory_format=torch.contiguous_format), _axes[name])


@custom_op(
    "tp_gather(Tensor x, str axis, int size) -> Tensor",
    fake=lambda x, name, size: x.new_empty(size * x.shape[0], *x.shape[1:]),
)
def _gather(x: Tensor, name: str, size: int) -> Tensor:
    return all_gather(x, _axes[name])


@custom_op(
    "tp_scatter(Tensor x, str axis, int size) -> Tensor",
    fake=lambda x, name, size: x.new_empty(x.shape[0] // size, *x.shape[1:]),
)
def _scatter(x: Tensor, name: str, size: int) -> Tensor:
    return reduce_scatter(x, _axes[name])


@custom_op("tp_exchange(Tensor x, str axis, int size) -> Tensor")
def _exchange(x: Tensor, name: str, size: int) -> Tensor:
    return all_to_all(x, _axes[name])


_TRANSPOSED = {
    all_to_all: _transposing(_exchange, _exchange),
    copy_in: _transposing(_same, _sum),
    sum_out: _transposing(_sum, _same),
    gather_in: _transposing(_gather, _scatter),
    scatter_out: _transposing(_scatter, _gather),
}
