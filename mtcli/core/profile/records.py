"""Defines the records that ranks of a profiled run send to rank 0: times, bytes, kernels."""

from typing import NamedTuple

from pydantic import TypeAdapter

from mtcli.core.parallel.pipeline import OpSpan
from mtcli.core.runtime.health.traffic import Sent
from mtcli.core.training.step import Phases


class WaitSeconds(NamedTuple):
    """Seconds that a rank's host waited for collectives in one step."""

    inside: dict[str, float]  # share of the seconds of its F, B, I and W ops
    by_axis: dict[str, float]  # seconds, hops included, whose sender may be late


class StepRecord(NamedTuple):
    """One step on one rank, in seconds of rank 0's clock; `tokens` are the global batch's, without
    padding.

    `waiting` is None where a device waits for collectives, or the recorder does not see all.
    """

    phases: Phases
    spans: tuple[OpSpan, ...]
    tokens: float
    waiting: WaitSeconds | None = None

    @property
    def seconds(self) -> float:
        """The length of the step on this rank."""
        return self.phases.end - self.phases.begin


class KernelTime(NamedTuple):
    """Time of a kernel in the profiled step; on CPU of an operator, without nested ones."""

    name: str
    calls: int
    seconds: float


class MemorySample(NamedTuple):
    """Bytes alive that were allocated since the step began; `activations` outlive their op."""

    seconds: float  # since the step began
    activations: int
    temporary: int

    @property
    def total(self) -> int:
        """Bytes of activations and temporaries."""
        return self.activations + self.temporary


class Profiled(NamedTuple):
    """The step that ran under torch.profiler, apart from the timed ones."""

    step: StepRecord
    exchanging: dict[str, float]  # share of F and of B seconds spent waiting for collectives
    communication: dict[str, float]  # seconds by collective, hidden or not
    overlapped: float  # seconds in which computation hides them
    kernels: list[KernelTime]  # by seconds, the longest first
    memory: list[MemorySample]
    by_axis: dict[str, float]  # seconds, of exchanges whose axis is known
    sent: list[Sent]


class RankRecord(NamedTuple):
    """The measurements of one rank; `speaks` where it is its pipeline rank's first replica."""

    rank: int
    pp_rank: int
    speaks: bool
    steps: list[StepRecord]
    profiled: Profiled
    state_bytes: dict[str, int]  # weights, gradients, optimizer
    allocated_bytes: int | None  # the most that the device's allocator gave out; None on CPU
    process_bytes: int  # the most that was resident (CPU), or what is taken of the device
    peak_flops: float

    def exchanging(self, step: StepRecord, kind: str) -> float:
        """The share of a step's ops of a kind that waits for collectives."""
        waiting = step.waiting.inside if step.waiting else self.profiled.exchanging
        return waiting.get(kind, 0.0)


RANK_RECORD = TypeAdapter(RankRecord)
"""Turns records into JSON, as ranks send them, and back."""
