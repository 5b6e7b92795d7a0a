"""Averages a flat tensor over replicas while they compute, in full or compressed.

In full it is an all-reduce. Quantised dense values take two phases: each replica owns a segment,
receives it from all, averages it and sends the average, quantised again, to all. Where the largest
values alone are sent, replicas all-gather them (SparseLoCo, arXiv:2508.15706).

Error feedback adds the error of compression to the next exchange: e = decay e + x, sent = Q(e),
e = e - sent. A segment's owner also adds the error of quantising the average, times the number of
replicas in it. So with decay 1 the sum of all averages, times the replicas, is the sum of all x
minus the errors that remain.

A replica can be absent: it sends zeros, does not count, and receives the average of the others.
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
        """Starts the average of x, which is all zeros on a replica that is not `present`."""

    def advance(self) -> None:
        """Waits for the first phase and starts the second, where there are two."""
        return

    def finish(self) -> tuple[Tensor, float]:
        """(mean over the replicas present, number of replicas present), equal on all replicas."""


class FullMean(ReplicaMean):
    """An all-reduce of all values."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def start(self, x: Tensor, present: bool) -> None:
        """Starts the sum of the values, and of a 1 for each replica present."""
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
    """A mean of compressed segments; `error`, times `decay`, is added to the next x."""

    def __init__(
        self, axis: Axis, segments: Sequence[Segment], error: Tensor, decay: float
    ) -> None:
        self.axis, self.segments, self.error, self.decay = axis, segments, error, decay


class LargestMean(CorrectedMean):
    """An all-gather of every replica's largest values."""

    def start(self, x: Tensor, present: bool) -> None:
        """Starts the all-gather of the largest values of x plus the error."""
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
    """An all-reduce of quantised values, as a reduce-scatter and an all-gather."""

    def start(self, x: Tensor, present: bool) -> None:
        """Starts sending each replica the segment that it owns of x plus the error."""
        self.error.mul_(self.decay).add_(x)
        self.owned_segment = self.segments[self.axis.rank]
        payloads = [_compressed(segment, self.error, float(present)) for segment in self.segments]
        for segment, payload in zip(self.segments, payloads, strict=True):
            _add(segment, payload, self.error, -1.0)
        sent, size = [segment.bytes for segment in self.segments], self.owned_segment.bytes
        self.sent = torch.cat(payloads)
        self.received, rows = self.sent.new_empty(self.axis.size, size), [size] * self.axis.size
        self.work = start_all_to_all_v(self.received.view(-1), self.sent, rows, sent, self.axis)
        self.advanced = False

    def advance(self) -> None:
        """Averages the owned segment and starts its all-gather."""
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
    """The payload of a segment of a flat tensor x: its groups, then `count` as float32 bytes."""
    count_bytes = torch.tensor([count], dtype=torch.float32, device=x.device).view(torch.uint8)
    pairs = zip(segment.forms, segment.groups, strict=True)
    return torch.cat(
        [*(compress(torch.cat(_views(x, group)), form) for form, group in pairs), count_bytes]
    )


def _add(segment: Segment, payload: Tensor, x: Tensor, factor: float = 1.0) -> float:
    """Adds a payload's values times `factor` to its segment of x; returns the payload's count."""
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
