"""Collectives: in-place ones, and differentiable ones whose gradients are their transposes.

All shard and gather dim 0. An axis of one rank is the identity. Sums are in the tensor's own dtype;
callers that need float32 sums cast first (gradient buckets are float32, but with train.gradients).
Each call is written to the axis's flight recorder, which names the peers that a rank waits for.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.transport.process_group import PendingWork, gather_json
from mtcli.core.parallel.transport.process_group import first_bytes as first_of
from mtcli.core.runtime.health.flight_recorder import Call


def all_reduce(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sums contiguous x over the axis (or reduces it by `op`), in place, on every rank."""
    if axis.size > 1:
        with axis.recorder.call("all_reduce", axis, x, op):
            axis.connected.all_reduce(x, op).wait()
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[N, ...] on each of n ranks -> [n * N, ...] in rank order."""
    if axis.size == 1:
        return x
    out = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    with axis.recorder.call("all_gather", axis, x):
        axis.connected.all_gather(out, x.contiguous()).wait()
    return out


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[n * N, ...] on each of n ranks -> [N, ...], this rank's rows of the sum."""
    if axis.size == 1:
        return x
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    with axis.recorder.call("reduce_scatter", axis, x):
        axis.connected.reduce_scatter(out, x.contiguous()).wait()
    return out


def broadcast(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Overwrites contiguous x by that of rank `source` of the axis."""
    if axis.size > 1:
        with axis.recorder.call("broadcast", axis, x, source):
            axis.connected.broadcast(x, source).wait()
    return x


class Pending:
    """A collective in flight, which overlaps this rank's computation."""

    def __init__(self, call: Call, start: Callable[[], PendingWork]) -> None:
        self.call = call
        with call:  # a transport may have to end an earlier one first
            self.work = start()

    def wait(self) -> None:
        """Waits until the collective is complete."""
        with self.call:
            self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


class NoWork:
    """The pending work of a collective of one rank, which is complete."""

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        return True


def _start(
    axis: Axis,
    op: str,
    x: Tensor,
    start: Callable[[], PendingWork],
    detail: object = None,
    out: Tensor | None = None,
) -> PendingWork:
    """Starts a collective; on an axis of one rank copies x to `out`."""
    if axis.size > 1:
        return Pending(axis.recorder.call(op, axis, x, detail), start)
    if out is not None:
        out.copy_(x.view_as(out))
    return NoWork()


def start_all_reduce(x: Tensor, axis: Axis) -> PendingWork:
    """Starts summing x over the axis, in place."""
    return _start(axis, "all_reduce", x, lambda: axis.connected.all_reduce(x, dist.ReduceOp.SUM))


def start_reduce_scatter(out: Tensor, x: Tensor, axis: Axis) -> PendingWork:
    """Starts x [n, ...] on each of n ranks -> out [...], this rank's row of the sum."""
    start = lambda: axis.connected.reduce_scatter(out, x)  # noqa: E731
    return _start(axis, "reduce_scatter", x, start, out=out)


def start_all_gather(out: Tensor, x: Tensor, axis: Axis) -> PendingWork:
    """Starts x [...] on each of n ranks -> out [n, ...]."""
    return _start(axis, "all_gather", x, lambda: axis.connected.all_gather(out, x), out=out)


def start_all_to_all_v(
    out: Tensor, x: Tensor, received: list[int], sent: list[int], axis: Axis
) -> PendingWork:
    """Starts x [sum(sent), ...] -> out [sum(received), ...]: sent[i] rows go to rank i."""
    start = lambda: axis.connected.all_to_all(out, x, received, sent)  # noqa: E731
    return _start(axis, "all_to_all_v", x, start, (sent, received), out)


def start_broadcast(x: Tensor, axis: Axis, root: int) -> PendingWork:
    """Starts overwriting x by that of the axis's rank `root`."""
    return _start(axis, "broadcast", x, lambda: axis.connected.broadcast(x, root), root)


def start_reduce(x: Tensor, axis: Axis, root: int) -> PendingWork:
    """Starts summing x over the axis into rank `root`'s x; the other ranks' x becomes undefined."""
    return _start(axis, "reduce", x, lambda: axis.connected.reduce(x, root), root)


def start_send(x: Tensor, axis: Axis, peer: int, what: str) -> Pending:
    """Starts sending x to a rank of the axis, whose `receive` names the same `what`."""
    call = axis.recorder.call("send", axis, x, what, peer)
    group = axis.p2p_group(axis.rank, peer)
    start = lambda: cast(PendingWork, dist.isend(x, axis.ranks[peer], group=group))  # noqa: E731
    return Pending(call, start)


def receive(x: Tensor, axis: Axis, peer: int, what: str) -> Tensor:
    """Receives `what` from a rank of the axis into x, which it returns."""
    with axis.recorder.call("recv", axis, x, what, peer):
        dist.recv(x, axis.ranks[peer], group=axis.p2p_group(peer, axis.rank))
    return x


class Messages:
    """Sends to and receives from several ranks of an axis, all in flight at once."""

    def __init__(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], axis: Axis, what: str
    ) -> None:
        """Starts sending `sent` and receiving into `received`, contiguous tensors by rank. Messages
        between two ranks arrive in order."""
        self.tensors = (*sent.values(), *received.values())  # alive until they are sent
        call = axis.recorder.call
        self.calls = [call("send", axis, x, what, peer) for peer, x in sent.items()]
        self.calls += [call("recv", axis, x, what, peer) for peer, x in received.items()]
        ops = [dist.P2POp(dist.isend, x, axis.ranks[i], axis.group) for i, x in sent.items()]
        ops += [dist.P2POp(dist.irecv, x, axis.ranks[i], axis.group) for i, x in received.items()]
        self.works: list[dist.Work] = []
        if ops:
            with self.calls[0]:
                self.works = dist.batch_isend_irecv(ops)

    def wait(self) -> None:
        """Waits until all are sent and received; NCCL's are one work."""
        for call, work in zip(self.calls, self.works, strict=False):
            with call:
                work.wait()


def gather_values(value: Any, axis: Axis) -> list[Any]:
    """Returns every rank's JSON value, in rank order, on every rank. Also a barrier."""
    if axis.group is None:
        return [json.loads(json.dumps(value))]
    with axis.recorder.call("gather_values", axis):
        return gather_json(value, axis.group)


def first_value(value: Any, axis: Axis) -> Any:
    """Returns, on every rank, the JSON value of the first rank whose value is not None. Also a
    barrier.

    A rank exchanges a few messages, however many ranks there are.
    """
    text = first_bytes(None if value is None else json.dumps(value).encode(), axis)
    return None if text is None else json.loads(text)


def first_bytes(data: bytes | None, axis: Axis) -> bytes | None:
    """Returns, on every rank, the bytes of the first rank that has any; None if none has."""
    if axis.group is None:
        return data
    with axis.recorder.call("first_value", axis):
        return first_of(data, axis.group)


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x


def _summed(x: Tensor, axis: Axis) -> Tensor:
    if axis.size == 1:
        return x
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def _all_to_all(x: Tensor, axis: Axis) -> Tensor:
    if axis.size == 1:
        return x
    out, k = torch.empty_like(x, memory_format=torch.contiguous_format), len(x)
    rows = [int(rank // k == axis.rank // k) for rank in range(axis.size)]
    with axis.recorder.call("all_to_all", axis, x):
        axis.connected.all_to_all(out, x.contiguous(), rows, rows).wait()
    return out


def _exchange(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    with axis.recorder.call("all_to_all_v", axis, x, (sent, received)):
        axis.connected.all_to_all(out, x.contiguous(), received, sent).wait()
    return out


def _exchange_back(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    return _exchange(x, received, sent, axis)


def _gather_v(x: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    copies = x.repeat(axis.size, *[1] * (x.dim() - 1))
    return _exchange(copies, [len(x)] * axis.size, sizes, axis)


def _scatter_v(x: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    own_rows = sizes[axis.rank]
    parts = _exchange(x, sizes, [own_rows] * axis.size, axis)
    return parts.view(axis.size, own_rows, *x.shape[1:]).sum(0)


def _differentiable(
    forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """A collective of (x, ..., axis) whose gradient is `backward`, its transpose."""

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
            ctx.args = args
            return forward(x, *args).view_as(x) if forward is _identity else forward(x, *args)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return backward(grad, *ctx.args), *[None] * len(ctx.args)

    def apply(x: Tensor, *args: Any) -> Tensor:
        return x if args[-1].size == 1 else Collective.apply(x, *args)  # type: ignore[no-untyped-call]  # torch

    return apply


# all_to_all exchanges among each k consecutive ranks of the axis, which are all of them or fewer:
# x[i] goes to rank i. The _v ones have rows of their own for each rank: sent[i] rows go to rank i.
# fmt: off
#                                   forward         backward          x on each of n ranks -> result
copy_in          = _differentiable(_identity,       _summed)        # [T, D] -> same  (Megatron's f)
sum_out          = _differentiable(_summed,         _identity)      # [T, D] -> sum   (Megatron's g)
gather_in        = _differentiable(all_gather,      reduce_scatter) # [T/n, D] -> [T, D]
scatter_out      = _differentiable(reduce_scatter,  all_gather)     # [T, D] -> summed [T/n, D]
all_to_all       = _differentiable(_all_to_all,     _all_to_all)    # [k, ...] -> [k, ...]
all_to_all_v     = _differentiable(_exchange,       _exchange_back) # (x, sent, received, axis)
all_gather_v     = _differentiable(_gather_v,       _scatter_v)     # (x, sizes, axis)
reduce_scatter_v = _differentiable(_scatter_v,      _gather_v)      # (x, sizes, axis)
# fmt: on


def start_exchange(
    x: Tensor, sent: list[int], received: list[int], axis: Axis
) -> Callable[[], Tensor]:
    """Starts `all_to_all_v`; the returned function waits for the rows that this rank receives.

    What is computed in between travels beside them; so does its backward beside their gradient,
    since autograd runs the nodes of a graph from the last to the first.
    """
    if axis.size == 1:
        return lambda: x
    flight = _Flight(axis)
    out = _Departure.apply(x, sent, received, flight)  # type: ignore[no-untyped-call]  # torch
    return lambda: _Arrival.apply(out, sent, received, flight)  # type: ignore[no-untyped-call]  # torch


class _Flight:
    """Rows on their way to other ranks."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def start(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Returns the memory of the rows that arrive."""
        self.sent, self.out = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        self.work = start_all_to_all_v(self.out, self.sent, received, sent, self.axis)
        return self.out

    def wait(self) -> Tensor:
        """Returns the rows that have arrived."""
        self.work.wait()
        out = self.out
        del self.sent, self.out, self.work
        return out


class _Departure(torch.autograd.Function):
    """Sends rows; its backward waits for the gradient, which `_Arrival`'s sent."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], flight: _Flight
    ) -> Tensor:
        ctx.flight = flight
        return flight.start(x, sent, received)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flight.wait(), None, None, None


class _Arrival(torch.autograd.Function):
    """Waits for rows; its backward sends their gradient, and passes on a tensor of its shape."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, sent: list[int], received: list[int], flight: _Flight
    ) -> Tensor:
        ctx.flight, ctx.sizes = flight, (received, sent)
        return flight.wait().view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.start(grad, *ctx.sizes)
        return grad, None, None, None


class RingShift:
    """Sends x to the next rank of a ring and receives the previous rank's, while this rank
    computes."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        x = x.contiguous()
        self.received = torch.empty_like(x)
        call = axis.recorder.call("rotate", axis, x)
        self.pending = Pending(call, lambda: axis.connected.shift(self.received, x))

    def wait(self) -> Tensor:
        """Returns the previous rank's tensor, once it has arrived."""
        self.pending.wait()
        return self.received
