"""What the ranks of a profiled run hand to rank 0: times on rank 0's clock, bytes and kernels."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mtcli.core.parallel.pp import OpSpan
    from mtcli.core.trainer import Phases


class StepRecord(NamedTuple):
    """One step on one rank, in seconds of rank 0's clock."""

    phases: "Phases"
    spans: tuple["OpSpan", ...]

    @property
    def seconds(self) -> float:
        """The length of the step on this rank."""
        return self.phases.end - self.phases.begin


class Kernel(NamedTuple):
    """What a kernel (or on CPU an operator, without those it calls) took in the profiled step."""

    name: str
    calls: int
    seconds: float


class Profiled(NamedTuple):
    """The step that ran under torch.profiler, apart from the timed ones."""

    step: StepRecord
    exchanging: dict[str, float]  # share of F and of B seconds spent waiting for collectives
    communication: dict[str, float]  # seconds by collective, hidden or not
    overlapped: float  # seconds in which computation hides them
    kernels: list[Kernel]  # by seconds, the longest first
    memory: list[tuple[float, int]]  # (seconds since the step began, bytes above its begin)


class RankRecord(NamedTuple):
    """All that one rank measured; `speaks` where it is its pipeline rank's first replica."""

    rank: int
    pp_rank: int
    speaks: bool
    steps: list[StepRecord]
    profiled: Profiled
    state_bytes: dict[str, int]  # weights, gradients, optimizer
    peak_bytes: int  # of the process (CPU: resident) or of the device's allocator
    peak_flops: float
