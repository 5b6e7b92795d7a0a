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

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.core.exchange.payload import COUNT_BYTES, Range, Segment
from mtcli.core.parallel.collectives import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all_v,
)
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.transport.process_group import PendingWork
from mtcli.core.sync.compression import compress, decompress


class ReplicaMean(Protocol):
    """One exchange of a flat tensor at a time. Every replica makes the same calls."""

    def start(self, x: Tensor, present: bool) -> None:
        """Starts the average of x; an absent replica's is all zeros."""

    def advance(self) -> None:
        """Waits for the first phase and starts the second, where there are two."""
        return

    def finish(self) -> tuple[Tensor, float]:
        """(the mean over replicas that were present, how many they were), the same on all."""


class FullMean(ReplicaMean):
    """An all-reduce of all values."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def start(self, x: Tensor, present: bool) -> None:
        """Starts the sum of the values and of a 1 for each replica."""
        self.sums = torch.cat([x, x.new_tensor([float(present)])])
        self.work = start_all_reduce(self.sums, self.axis)

    def finish(self) -> tuple[Tensor, float]:
        """Waits for the sums; see ReplicaMean."""
        self.work.wait()
        count = float(self.sums[-1])
        sums = self.sums[:-1]
        del self.sums
        return sums / max(1.0, count), count


class CorrectedMean(ReplicaMean):
    """A mean of segments that are compressed apart; `error`, times `decay`, is fed back."""

    def __init__(
        self, axis: Axis, segments: Sequence[Segment], error: Tensor, decay: float
    ) -> None:
        self.axis, self.segments, self.error, self.decay = axis, segments, error, decay


class LargestMean(CorrectedMean):
    """An all-gather of every replica's largest values."""

    def start(self, x: Tensor, present: bool) -> None:
        """Starts the all-gather of what is sent of x and the error."""
        (self.segment,) = self.segments
        self.error.mul_(self.decay).add_(x)
        payload = _compressed(self.segment, self.error, float(present))
        _add(self.segment, payload, self.error, -1.0)
        self.sent = payload
        self.gathered, self.work = _gather(self.sent, self.axis)

    def finish(self) -> tuple[Tensor, float]:
        """Waits and averages in the order of replicas; see ReplicaMean."""
        self.work.wait()
        mean = torch.zeros_like(self.error)
        count = sum(_add(self.segment, payload, mean) for payload in self.gathered)
        del self.sent, self.gathered
        return mean / max(1.0, count), count


class QuantisedMean(CorrectedMean):
    """A reduce-scatter and an all-gather of quantised values, as an all-reduce is made of both."""

    def start(self, x: Tensor, present: bool) -> None:
        """Starts sending each replica its segment of x and the error."""
        self.error.mul_(self.decay).add_(x)
        self.owned_segment = self.segments[self.axis.rank]
        payloads = [_compressed(segment, self.error, float(present)) for segment in self.segments]
        for segment, payload in zip(self.segments, payloads, strict=True):
            _add(segment, payload, self.error, -1.0)
        sent, owned_bytes = [segment.bytes for segment in self.segments], self.owned_segment.bytes
        self.sent = torch.cat(payloads)
        self.received, rows = (
            self.sent.new_empty(self.axis.size, owned_bytes),
            [owned_bytes] * self.axis.size,
        )
        self.work = start_all_to_all_v(self.received.view(-1), self.sent, rows, sent, self.axis)
        self.advanced = False

    def advance(self) -> None:
        """Averages the own segment and starts sending it to all."""
        if self.advanced:
            return
        self.work.wait()
        mean = torch.zeros_like(self.error)
        count = sum(_add(self.owned_segment, payload, mean) for payload in self.received)
        mean.div_(max(1.0, count))
        mean_payload = _compressed(self.owned_segment, mean, count)
        _add(self.owned_segment, mean_payload, mean, -1.0)
        self.error.add_(mean, alpha=count)
        longest = max(segment.bytes for segment in self.segments)
        self.sent = F.pad(mean_payload, (0, longest - len(mean_payload)))
        self.gathered, self.work = _gather(self.sent, self.axis)
        self.advanced = True
        del self.received

    def finish(self) -> tuple[Tensor, float]:
        """Waits for all segments; see ReplicaMean."""
        self.advance()
        self.work.wait()
        mean, count = torch.zeros_like(self.error), 0.0
        for segment, payload in zip(self.segments, self.gathered, strict=True):
            count = _add(segment, payload, mean)
        del self.sent, self.gathered
        return mean, count


def _compressed(segment: Segment, x: Tensor, count: float) -> Tensor:
    """The payload of a flat tensor's segment, in which so many replicas are."""
    count_bytes = torch.tensor([count], dtype=torch.float32, device=x.device).view(torch.uint8)
    pairs = zip(segment.forms, segment.groups, strict=True)
    return torch.cat(
        [*(compress(torch.cat(_views(x, group)), form) for form, group in pairs), count_bytes]
    )


def _add(segment: Segment, payload: Tensor, x: Tensor, factor: float = 1.0) -> float:
    """Adds what a payload stands for to its segment of a flat tensor; returns its count."""
    *parts, count_bytes = payload[: segment.bytes].split([*segment.sizes, COUNT_BYTES])
    forms, lengths = segment.forms, segment.lengths
    for part, form, length, group in zip(parts, forms, lengths, segment.groups, strict=True):
        values = decompress(part, form, length).split([n for _, n in group])
        torch._foreach_add_(_views(x, group), list(values), alpha=factor)
    return float(count_bytes.clone().view(torch.float32))


def _views(x: Tensor, ranges: Iterable[Range]) -> list[Tensor]:
    return [x[at : at + length] for at, length in ranges]


def _gather(payload: Tensor, axis: Axis) -> tuple[Tensor, PendingWork]:
    """Starts the all-gather of payloads [bytes] of equal length -> [n, bytes]."""
    out = payload.new_empty(axis.size, len(payload))
    return out, start_all_gather(out, payload, axis)
