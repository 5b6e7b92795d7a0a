"""CUDA events that mark a place in a stream: whether and when the device passed it."""

from typing import cast

import torch


class CudaMark:
    """An event at the end of the current stream's queue."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def reached(self) -> bool:
        """Whether the device has passed it."""
        return cast(bool, self.event.query())

    def seconds_since(self, earlier: "CudaMark") -> float:
        """Seconds on the device since an earlier mark; both must be reached."""
        return cast(float, earlier.event.elapsed_time(self.event)) / 1000.0
