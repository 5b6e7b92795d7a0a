"""Averages a flat tensor over replicas while they compute, in full or compressed.

In full it is an all-reduce. Compressed values that are dense take two phases: each replica sends
every other one its segment, whose owner averages it and sends all the average, compressed again.
Of the largest values each replica sends all others the same bytes (SparseLoCo, arXiv:2508.15706).

Error feedback keeps what compression has lost for the next exchange: e = decay e + x, sent = Q(e),
e = e - sent. What the owner of a segment loses of the average counts for all who are in it, and
goes into the owner's own error. So the sum of all that was averaged, times the replicas, is the sum
of what they had, less the errors that are left.

A replica can be absent: it sends zeros and does not count, and receives the average of the others.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.core.config.sync import SyncConfig
from mtcli.core.config.sync_payload import BLOCK, Payload
from mtcli.core.parallel.collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_all_to_all_v,
)
from mtcli.core.parallel.groups import Axis
from mtcli.core.sync.compression import compress, decompress

COUNT_BYTES = 4  # a float32 at the end of a payload: how many replicas are in it


class ReplicaMean(Protocol):
    """One exchange of a flat tensor at a time. Every replica makes the same calls."""

    def start(self, x: Tensor, present: bool) -> None:
        """Starts the average of x; an absent replica's is all zeros."""

    def advance(self) -> None:
        """Waits for the first phase and starts the second, where there are two."""

    def finish(self) -> tuple[Tensor, float]:
        """(the mean over replicas that were present, how many they were), the same on all."""


class FullMean(ReplicaMean):
    """An all-reduce of all values."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def start(self, x: Tensor, present: bool) -> None:
        """Starts the sum of the values and of a 1 for each replica."""
        self.sums = torch.cat([x, x.new_tensor([float(present)])])
        self.work = _begun(self.axis, lambda: start_all_reduce(self.sums, self.axis))

    def finish(self) -> tuple[Tensor, float]:
        """Waits for the sums; see ReplicaMean."""
        _wait(self.work)
        count = float(self.sums[-1])
        sums = self.sums[:-1]
        del self.sums
        return sums / max(1.0, count), count


class Segment(NamedTuple):
    """Some of a flat tensor: (offset, length) of ranges of parameters, each with its own rows."""

    ranges: tuple[tuple[int, int], ...]
    forms: tuple[Payload, ...]

    @classmethod
    def of(cls, sync: SyncConfig, ranges: Sequence[tuple[int, int]]) -> "Segment":
        """The segment of some ranges."""
        return cls(tuple(ranges), tuple(Payload.of(sync, length) for _, length in ranges))

    @property
    def bytes(self) -> int:
        """Bytes of a payload, with its count."""
        pairs = zip(self.forms, self.ranges, strict=True)
        return COUNT_BYTES + sum(sum(form.sizes(length)) for form, (_, length) in pairs)

    def compress(self, x: Tensor, count: float) -> Tensor:
        """The payload of a flat tensor's ranges, in which so many replicas are."""
        pairs = zip(self.forms, self.ranges, strict=True)
        told = torch.tensor([count], dtype=torch.float32, device=x.device).view(torch.uint8)
        return torch.cat([*(compress(x[at : at + n], form) for form, (at, n) in pairs), told])

    def add_(self, payload: Tensor, x: Tensor, factor: float = 1.0) -> float:
        """Adds what a payload stands for to the ranges of a flat tensor; returns its count."""
        payload = payload[: self.bytes]
        sizes = [sum(form.sizes(n)) for form, (_, n) in zip(self.forms, self.ranges, strict=True)]
        *parts, told = payload.split([*sizes, COUNT_BYTES])
        for part, form, (at, n) in zip(parts, self.forms, self.ranges, strict=True):
            x[at : at + n].add_(decompress(part, form, n), alpha=factor)
        return float(told.clone().view(torch.float32))


class LargestMean(ReplicaMean):
    """An all-gather of every replica's largest values."""

    def __init__(
        self, axis: Axis, sync: SyncConfig, sizes: Mapping[str, int], error: Tensor
    ) -> None:
        """`sizes` are those of parameters, one after another, and `error` what is fed back."""
        self.axis, self.error, self.decay = axis, error, sync.error_decay
        self.segment = Segment.of(sync, _ranges(sizes))

    def start(self, x: Tensor, present: bool) -> None:
        """Starts the all-gather of what is sent of x and the error."""
        self.error.mul_(self.decay).add_(x)
        own = self.segment.compress(self.error, float(present))
        self.segment.add_(own, self.error, -1.0)
        self.gathered, self.work = _gather(own, self.axis)

    def finish(self) -> tuple[Tensor, float]:
        """Waits and averages in the order of replicas; see ReplicaMean."""
        _wait(self.work)
        mean = torch.zeros_like(self.error)
        count = sum(self.segment.add_(payload, mean) for payload in self.gathered)
        del self.gathered
        return mean / max(1.0, count), count


class QuantisedMean(ReplicaMean):
    """A reduce-scatter and an all-gather of quantised values, as an all-reduce is made of both."""

    def __init__(
        self, axis: Axis, sync: SyncConfig, sizes: Mapping[str, int], error: Tensor
    ) -> None:
        """See LargestMean."""
        self.axis, self.error, self.decay = axis, error, sync.error_decay
        self.segments = [Segment.of(sync, ranges) for ranges in _shared(sizes, axis.size)]
        self.own = self.segments[axis.rank]
        self.advanced = False

    def start(self, x: Tensor, present: bool) -> None:
        """Starts sending each replica its segment of x and the error."""
        self.error.mul_(self.decay).add_(x)
        payloads = [segment.compress(self.error, float(present)) for segment in self.segments]
        for segment, payload in zip(self.segments, payloads, strict=True):
            segment.add_(payload, self.error, -1.0)
        sent, own = [segment.bytes for segment in self.segments], self.own.bytes
        self.sent = torch.cat(payloads)
        self.received, rows = self.sent.new_empty(self.axis.size, own), [own] * self.axis.size
        into, axis = self.received.view(-1), self.axis
        if axis.size == 1:
            into.copy_(self.sent)
        self.work = _begun(axis, lambda: start_all_to_all_v(into, self.sent, rows, sent, axis))
        self.advanced = False

    def advance(self) -> None:
        """Averages the own segment and starts sending it to all."""
        if self.advanced:
            return
        _wait(self.work)
        mean = torch.zeros_like(self.error)
        count = sum(self.own.add_(payload, mean) for payload in self.received)
        mean.div_(max(1.0, count))
        own = self.own.compress(mean, count)
        self.own.add_(own, mean, -1.0)
        self.error.add_(mean, alpha=count)
        longest = max(segment.bytes for segment in self.segments)
        self.gathered, self.work = _gather(F.pad(own, (0, longest - len(own))), self.axis)
        self.advanced = True
        del self.sent, self.received

    def finish(self) -> tuple[Tensor, float]:
        """Waits for all segments; see ReplicaMean."""
        self.advance()
        _wait(self.work)
        mean, count = torch.zeros_like(self.error), 0.0
        for segment, payload in zip(self.segments, self.gathered, strict=True):
            count = segment.add_(payload, mean)
        del self.gathered
        return mean, count


def _ranges(sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """(offset, length) of parameters that lie one after another."""
    offsets = accumulate(sizes.values(), initial=0)
    return list(zip(offsets, sizes.values(), strict=False))


def _shared(sizes: Mapping[str, int], owners: int) -> list[list[tuple[int, int]]]:
    """The ranges of each owner's segment: its share of every parameter's blocks.

    That depends on the parameter alone, so that its copies on other ranks, as those of a tied
    embedding, lose the same. The name says who owns the first, which is all there is of a bias.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in range(owners)]
    for (name, length), (offset, _) in zip(sizes.items(), _ranges(sizes), strict=True):
        blocks = -(-length // BLOCK)
        ends = [min(length, blocks * i // owners * BLOCK) for i in range(owners + 1)]
        for i, (first, last) in enumerate(pairwise(ends)):
            if first < last:
                owner = (i + crc32(name.encode())) % owners
                found[owner].append((offset + first, last - first))
    return found


def _gather(own: Tensor, axis: Axis) -> tuple[Tensor, Pending | None]:
    """Starts the all-gather of payloads [bytes] of equal length -> [n, bytes]."""
    out = own.new_empty(axis.size, len(own))
    if axis.size == 1:
        out.copy_(own)
    return out, _begun(axis, lambda: start_all_gather(out, own, axis))


def _begun(axis: Axis, start: Callable[[], Pending]) -> Pending | None:
    """What was started, where there is somebody to exchange with."""
    return start() if axis.size > 1 else None


def _wait(work: Pending | None) -> None:
    if work is not None:
        work.wait()
