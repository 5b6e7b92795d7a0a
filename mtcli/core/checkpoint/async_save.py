"""Copies a rank's shards to host memory, so that training goes on while they are written.

The memory is allocated once, in a thread during the first steps, and used by every save: on a busy
machine, copying took 0.65 s of a core per GB into new memory, and 0.18 s into used memory.
"""

from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.blocks import aligned_bytes
from mtcli.core.checkpoint.store import Shard

ALIGNMENT = 64  # bytes: of every dtype's elements, and a cache line


class HostCopy(NamedTuple):
    """Shards in host memory. `wait` blocks until the copies are complete, and returns the device's
    seconds."""

    shards: list[Shard]
    wait: Callable[[], float]


class Snapshot:
    """The host memory that a rank's saves share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.reserving: Thread | None = None

    def reserve(self, shards: list[Shard]) -> None:
        """Starts to allocate memory for shards of these sizes."""
        size = _ends(shards)[-1]
        self.reserving = Thread(target=self._reserve, args=(size,), daemon=True)
        self.reserving.start()

    def close(self) -> None:
        """Waits for an allocation in progress."""
        if self.reserving is not None:
            self.reserving.join()

    def take(self, shards: list[Shard]) -> HostCopy:
        """Copies shards; the copies are valid until the next call.

        On CUDA the copies are queued in the current stream, so later kernels of the stream may
        change the originals. Raises MemoryError where the memory cannot be allocated.
        """
        self.close()
        ends = _ends(shards)
        if len(self.memory) < ends[-1]:
            self.memory = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
            self.memory = _host_memory(ends[-1], self.device)
        done = _timer(self.device)
        starts = zip(shards, ends[:-1], strict=True)
        return HostCopy([self._copy(shard, start) for shard, start in starts], done())

    def _reserve(self, size: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread is at device 0, and would open it
        with suppress(MemoryError):  # the first snapshot says so, and the run goes on
            memory = _host_memory(size, self.device)
            memory.numpy().fill(0)  # numpy's, which leaves the training's threads alone
            self.memory = memory

    def _copy(self, shard: Shard, start: int) -> Shard:
        source = shard.tensor.detach()
        room = self.memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
        return shard._replace(tensor=room.copy_(source, non_blocking=True))


def _ends(shards: list[Shard]) -> list[int]:
    """Returns the offset of each shard in the memory, and the end of the last one."""
    ends = [0]
    for shard in shards:
        ends.append(ends[-1] + -(-shard.tensor.nbytes // ALIGNMENT) * ALIGNMENT)
    return ends


def on_host(shards: list[Shard]) -> HostCopy:
    """Returns shards in host memory; copies only those on a device."""
    return HostCopy([shard._replace(tensor=shard.tensor.cpu()) for shard in shards], lambda: 0.0)


def _host_memory(size: int, device: torch.device) -> Tensor:
    try:
        if device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(aligned_bytes(size))
    except (OSError, RuntimeError) as error:
        raise MemoryError(f"{size} bytes of host memory: {error}") from None


def _timer(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts a timer of copies; calling the result once all are queued returns `HostCopy.wait`."""
    if device.type != "cuda":
        return lambda: lambda: 0.0
    begin, end = map(torch.cuda.Event, (True, True))  # enable_timing
    begin.record()

    def wait() -> float:
        end.synchronize()
        seconds: float = begin.elapsed_time(end) / 1e3
        return seconds

    def queued() -> Callable[[], float]:
        end.record()
        return wait

    return queued
