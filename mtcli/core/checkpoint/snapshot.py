"""A copy of a rank's pieces in host memory, so that training goes on while they are written.

The memory is taken once and used by every save: the first touch of new memory in ordinary pages
goes at about 1 GB/s.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.blocks import aligned_bytes
from mtcli.core.checkpoint.store import Piece

ALIGNMENT = 64  # bytes: of every dtype's elements, and a cache line


class Taken(NamedTuple):
    """Pieces in host memory. `wait` returns once they are there: the seconds a device took."""

    pieces: list[Piece]
    wait: Callable[[], float]


class Snapshot:
    """The host memory of a rank's saves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8)

    def take(self, pieces: list[Piece]) -> Taken:
        """Copies of pieces, which are good until the next call.

        On CUDA they are copied in the stream of what computed them, so what comes later in it may
        change the originals. Raises MemoryError where there is no room for them.
        """
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + -(-piece.tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        if len(self.memory) < ends[-1]:
            self.memory = torch.empty(0, dtype=torch.uint8)  # before more is taken
            self.memory = _host_memory(ends[-1], self.device)
        done = _timer(self.device)
        places = zip(pieces, ends[:-1], strict=True)
        return Taken([self._copy(piece, start) for piece, start in places], done())

    def _copy(self, piece: Piece, start: int) -> Piece:
        source = piece.tensor.detach()
        room = self.memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
        return piece._replace(tensor=room.copy_(source, non_blocking=True))


def in_place(pieces: list[Piece]) -> Taken:
    """The pieces in host memory, without a copy where they are there already."""
    return Taken([piece._replace(tensor=piece.tensor.cpu()) for piece in pieces], lambda: 0.0)


def _host_memory(size: int, device: torch.device) -> Tensor:
    try:
        if device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(aligned_bytes(size))
    except (OSError, RuntimeError) as error:
        raise MemoryError(f"{size} bytes of host memory: {error}") from None


def _timer(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Called where copies begin; what it returns, where all are queued, gives Taken's `wait`."""
    if device.type != "cuda":
        return lambda: lambda: 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()

    def wait() -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def queued() -> Callable[[], float]:
        end.record()
        return wait

    return queued
