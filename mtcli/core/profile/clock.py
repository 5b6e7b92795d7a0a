"""Times a step: takes stamps while the step runs, and converts them to seconds afterwards."""

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.groups import Axis

ROUNDS = 8  # barriers between which clocks of two machines are compared


class HostClock:
    """A clock of the host, perf_counter: on CPU an op is over when its call returns.

    Call `begin` before a step and `end` after it; `seconds` then converts the step's stamps.
    """

    def __call__(self) -> float:
        """Stamps the current moment."""
        return perf_counter()

    def begin(self) -> None:
        """Does nothing: a host's clock needs no start."""

    def end(self) -> None:
        """Does nothing: ops are over when their calls return."""

    def seconds(self, stamp: float) -> float:
        """Converts a stamp to seconds of this process's perf_counter: the stamp itself."""
        return stamp


class DeviceClock:
    """A clock of CUDA events: stamps points of the device's stream without synchronising."""

    def __init__(self) -> None:
        self.begin()

    def __call__(self) -> float:
        """Records an event, and returns its number."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)
        return float(len(self.events) - 1)

    def begin(self) -> None:
        """Ties the device's clock to the host's."""
        self.events: list[torch.cuda.Event] = []
        self.base = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.base.record()
        torch.cuda.synchronize()
        self.base_seconds = perf_counter()

    def end(self) -> None:
        """Waits until the device is done."""
        torch.cuda.synchronize()

    def seconds(self, stamp: float) -> float:
        """Converts an event's number to the second at which the device reached it."""
        elapsed_ms: float = self.base.elapsed_time(self.events[int(stamp)])
        return self.base_seconds + elapsed_ms / 1e3


Clock = HostClock | DeviceClock


def clock_for(device: torch.device) -> Clock:
    """The clock of a device's work."""
    return DeviceClock() if device.type == "cuda" else HostClock()


def op_range(device: torch.device) -> Callable[[object], AbstractContextManager[object]]:
    """Makes the NVTX range of an op, which shows its name in tools such as Nsight."""
    if device.type != "cuda":
        return nullcontext
    return lambda op: torch.cuda.nvtx.range(str(op))


def clock_offset(world: Axis) -> float:
    """Measures the seconds to add to this rank's perf_counter to get rank 0's.

    Processes of one machine share that clock. Those of others compare the moments at which they
    leave the same barriers: the median of ROUNDS, good to a barrier's latency.
    """
    moments = []
    for _ in range(ROUNDS):
        gather_values(None, world)
        moments.append(perf_counter())
    boot = Path("/proc/sys/kernel/random/boot_id")  # containers of a host share it, and its clock
    machine = boot.read_text().strip() if boot.exists() else platform.node()
    by_rank = gather_values((machine, moments), world)
    return offset_between(by_rank[0], by_rank[world.rank])


def offset_between(first: tuple[str, list[float]], local: tuple[str, list[float]]) -> float:
    """Seconds to add to the local clock to get the first rank's.

    Both ranks give (machine, moments at which the rank left each barrier).
    """
    if first[0] == local[0]:
        return 0.0
    return median(a - b for a, b in zip(first[1], local[1], strict=True))
