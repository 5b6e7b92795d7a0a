"""Marks in a CUDA stream: whether the device has got there, and when."""

from typing import cast

import torch


class CudaMark:
    """A mark at the end of the current stream's queue."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def reached(self) -> bool:
        """Whether the device has got past it."""
        return cast(bool, self.event.query())

    def seconds_since(self, earlier: "CudaMark") -> float:
        """The device's seconds from an earlier mark; both are reached."""
        return cast(float, earlier.event.elapsed_time(self.event)) / 1000.0
