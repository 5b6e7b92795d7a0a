"""Collectives: plain ones, and differentiable ones that are each other's transposes.

All cut and gather dim 0. An axis of one rank is the identity. Sums are done in the tensor's own
dtype; callers that need float32 sums cast first (gradient buckets are float32 always). Each one is
written in the axis's recorder, so that a rank that waits can say for whom.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.health.flight_recorder import Call
from mtcli.core.parallel.transport.process_group import PendingWork, gather_json


def all_reduce(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or `op`) over the axis, in place; x, contiguous, on every rank."""
    if axis.size > 1:
        with axis.recorder.call("all_reduce", axis, x, op):
            axis.transport.all_reduce(x, op).wait()
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[N, ...] on each of n ranks -> [n * N, ...] in rank order."""
    if axis.size == 1:
        return x
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    with axis.recorder.call("all_gather", axis, x):
        axis.transport.all_gather(out, x.contiguous()).wait()
    return out


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[n * N, ...] on each of n ranks -> the sum's [N, ...] of this rank."""
    if axis.size == 1:
        return x
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    with axis.recorder.call("reduce_scatter", axis, x):
        axis.transport.reduce_scatter(out, x.contiguous()).wait()
    return out


class Pending:
    """A collective under way, beside what this rank does next."""

    def __init__(self, call: Call, start: Callable[[], PendingWork]) -> None:
        self.call = call
        with call:  # a transport may have to end an earlier one first
            self.work = start()

    def wait(self) -> None:
        """Returns when it is done."""
        with self.call:
            self.work.wait()

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self.work.is_completed()


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Starts the sum over the axis, in place."""
    call = axis.recorder.call("all_reduce", axis, x)
    return Pending(call, lambda: axis.transport.all_reduce(x, dist.ReduceOp.SUM))


def start_reduce_scatter(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Starts x [n, ...] on each of n ranks -> out [...], row `rank` of the sum."""
    call = axis.recorder.call("reduce_scatter", axis, x)
    return Pending(call, lambda: axis.transport.reduce_scatter(out, x))


def start_all_gather(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Starts x [...] on each of n ranks -> out [n, ...]."""
    call = axis.recorder.call("all_gather", axis, x)
    return Pending(call, lambda: axis.transport.all_gather(out, x))


def start_send(x: Tensor, axis: Axis, peer: int, what: str) -> Pending:
    """Starts sending x to a rank of the axis, which receives `what` under the same name."""
    call = axis.recorder.call("send", axis, x, what, peer)
    return Pending(call, lambda: dist.isend(x, axis.ranks[peer], group=axis.group))


def receive(x: Tensor, axis: Axis, peer: int, what: str) -> Tensor:
    """x, filled with what a rank of the axis has sent."""
    with axis.recorder.call("recv", axis, x, what, peer):
        dist.recv(x, axis.ranks[peer], group=axis.group)
    return x


def gather_values(value: Any, axis: Axis) -> list[Any]:
    """Every rank's value, in rank order, on every rank: what JSON can say. Also a barrier."""
    if axis.group is None:
        return [json.loads(json.dumps(value))]
    with axis.recorder.call("gather_values", axis):
        return gather_json(value, axis.group)


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x


def _summed(x: Tensor, axis: Axis) -> Tensor:
    if axis.size == 1:
        return x
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def _differentiable(forward: Callable, backward: Callable) -> Callable[[Tensor, Axis], Tensor]:
    """A collective is linear, so its gradient is its transpose, itself a collective."""

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
            ctx.axis = axis
            return forward(x, axis).view_as(x) if forward is _identity else forward(x, axis)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return backward(grad, ctx.axis), None

    def apply(x: Tensor, axis: Axis) -> Tensor:
        return x if axis.size == 1 else Collective.apply(x, axis)

    return apply


# fmt: off
#                              forward         backward          x on each of n ranks -> result
copy_in     = _differentiable(_identity,       _summed)        # [T, D]   -> same   (Megatron's f)
sum_out     = _differentiable(_summed,         _identity)      # [T, D]   -> sum    (Megatron's g)
gather_in   = _differentiable(all_gather,      reduce_scatter) # [T/n, D] -> [T, D]
scatter_out = _differentiable(reduce_scatter,  all_gather)     # [T, D]   -> summed [T/n, D]
# fmt: on


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """[k, ...], part i for rank i -> [k, ...], part i from rank i, of each k consecutive ranks of
    the axis, which are all of them or fewer.

    Differentiable, and its own transpose.
    """
    return _exchange_even(x, axis)


class RingShift:
    """x of the previous rank of a ring, on its way while this rank computes."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        x = x.contiguous()
        self.received = torch.empty_like(x)
        call = axis.recorder.call("rotate", axis, x)
        self.pending = Pending(call, lambda: axis.transport.shift(self.received, x))

    def wait(self) -> Tensor:
        """The tensor, once it is here."""
        self.pending.wait()
        return self.received


def _all_to_all_even(x: Tensor, axis: Axis) -> Tensor:
    if axis.size == 1:
        return x
    out, k = torch.empty_like(x, memory_format=torch.contiguous_format), len(x)
    rows = [int(rank // k == axis.rank // k) for rank in range(axis.size)]
    with axis.recorder.call("all_to_all", axis, x):
        axis.transport.all_to_all(out, x.contiguous(), rows, rows).wait()
    return out


_exchange_even = _differentiable(_all_to_all_even, _all_to_all_even)


def all_to_all_v(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """[sum(sent), ...] -> [sum(received), ...]: sent[i] rows go to rank i. Differentiable."""
    return x if axis.size == 1 else _AllToAllV.apply(x, sent, received, axis)


class _AllToAllV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
        ctx.arguments = received, sent, axis
        return _exchange(x, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, *ctx.arguments), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    with axis.recorder.call("all_to_all_v", axis, x, (sent, received)):
        axis.transport.all_to_all(out, x.contiguous(), received, sent).wait()
    return out


def all_gather_v(x: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """[sizes[rank], ...] on each rank -> [sum(sizes), ...]. Its transpose is reduce_scatter_v."""
    return x if axis.size == 1 else _AllGatherV.apply(x, sizes, axis)


def reduce_scatter_v(x: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """[sum(sizes), ...] on each rank -> the sum's [sizes[rank], ...] of this rank."""
    return x if axis.size == 1 else _ReduceScatterV.apply(x, sizes, axis)


class _AllGatherV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], axis: Axis) -> Tensor:
        ctx.arguments = sizes, axis
        return _gather_v(x, sizes, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_v(grad, *ctx.arguments), None, None


class _ReduceScatterV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], axis: Axis) -> Tensor:
        ctx.arguments = sizes, axis
        return _scatter_v(x, sizes, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather_v(grad, *ctx.arguments), None, None


def _gather_v(x: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    copies = x.repeat(axis.size, *[1] * (x.dim() - 1))
    return _exchange(copies, [len(x)] * axis.size, sizes, axis)


def _scatter_v(x: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    mine = sizes[axis.rank]
    parts = _exchange(x, sizes, [mine] * axis.size, axis)
    return parts.view(axis.size, mine, *x.shape[1:]).sum(0)
