"""Mixes a tensor of each replica: W x replaces x, with W of exchange/topology.py.

Neighbours send each other their tensors, all messages of a mix at once, while the rank computes.
The graph "full" is an all-reduce. In the graph "hierarchical", with m replicas per machine, a rank
averages 1/m of its machine's tensors, mixes that with the same 1/m of other machines, and sends the
result to its machine's ranks.
"""

from typing import Protocol

import torch
from torch import Tensor

from mtcli.core.exchange.topology import MixingGraph
from mtcli.core.parallel.collectives import Messages, start_all_reduce
from mtcli.core.parallel.groups import Axis


class Mix(Protocol):
    """Mixes one flat tensor over the ranks of an axis, which all make the same calls."""

    x: Tensor
    """[elements]: the caller fills it ahead of `start`; W x after `wait`"""

    def start(self, step: int) -> None:
        """Starts the mix with the matrix of a step; x must not change until `wait` returns."""

    def wait(self) -> None:
        """Waits until x is W x."""

    def buffers(self) -> list[Tensor]:
        """The tensors that it allocates."""


def mix_of(graph: MixingGraph, axis: Axis, like: Tensor) -> Mix:
    """A mix of tensors shaped as `like`, over the replicas of a graph."""
    if graph.name == "hierarchical":
        return _MachineMix(graph, axis, like)
    return (_Average if graph.name == "full" else _NeighbourMix)(graph, axis, like)


class _Average(Mix):
    """The mean over all replicas: the same bits on each."""

    def __init__(self, graph: MixingGraph, axis: Axis, like: Tensor) -> None:
        self.axis, self.x = axis, torch.empty_like(like)

    def start(self, step: int) -> None:
        self.pending = start_all_reduce(self.x, self.axis)

    def wait(self) -> None:
        self.pending.wait()
        self.x /= self.axis.size

    def buffers(self) -> list[Tensor]:
        return [self.x]


class _NeighbourMix(Mix):
    """A weighted sum of what neighbours send, each all of its tensor."""

    def __init__(self, graph: MixingGraph, axis: Axis, like: Tensor) -> None:
        self.graph, self.axis, self.x = graph, axis, torch.empty_like(like)
        self.received = like.new_empty(len(graph.senders(axis.rank)), *like.shape)

    def start(self, step: int) -> None:
        rank = self.axis.rank
        self.row = self.graph.row(rank, step)
        self.messages = Messages(
            {peer: self.x for peer in self.graph.receivers(rank, step)},
            dict(zip(self.graph.senders(rank, step), self.received, strict=True)),
            self.axis,
            "replica",
        )

    def wait(self) -> None:
        self.messages.wait()
        row, rank = self.row, self.axis.rank
        self.x *= row[rank]
        for peer, x in zip(sorted(row.keys() - {rank}), self.received, strict=True):
            self.x.add_(x, alpha=row[peer])

    def buffers(self) -> list[Tensor]:
        return [self.x, self.received]


class _MachineMix(Mix):
    """The average over a machine's replicas, mixed with those of other machines."""

    def __init__(self, graph: MixingGraph, axis: Axis, like: Tensor) -> None:
        self.above, self.axis, m = graph.machines, axis, graph.machine_size
        self.machine, self.local = divmod(axis.rank, m)
        chunk = -(-like.numel() // m)
        self.padded = like.new_zeros(m, chunk)
        self.x = self.padded.flatten()[: like.numel()]
        self.mates = {k: self.machine * m + k for k in range(m) if k != self.local}
        self.others = [k * m + self.local for k in self.above.senders(self.machine)]
        self.received = like.new_zeros(max(m - 1, len(self.others)), chunk)

    def start(self, step: int) -> None:
        sent = {rank: self.padded[k] for k, rank in self.mates.items()}
        received = dict(zip(self.mates.values(), self.received, strict=False))
        self.messages = Messages(sent, received, self.axis, "machine's part")

    def wait(self) -> None:
        self.messages.wait()
        mean, m = self.padded[self.local], len(self.padded)
        for part in self.received[: m - 1]:
            mean += part
        mean /= m
        received = dict(zip(self.others, self.received, strict=False))
        Messages(dict.fromkeys(self.others, mean), received, self.axis, "replica").wait()
        row = self.above.row(self.machine)
        mean *= row[self.machine]
        for rank, part in received.items():
            mean.add_(part, alpha=row[rank // m])
        sent = dict.fromkeys(self.mates.values(), mean)
        received = {rank: self.padded[k] for k, rank in self.mates.items()}
        Messages(sent, received, self.axis, "machine's mean").wait()

    def buffers(self) -> list[Tensor]:
        return [self.padded, self.received]
