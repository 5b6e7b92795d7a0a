"""Defines the live bytes of a rank without its state: estimated, or measured by rehearsing
stages."""

from collections.abc import Sequence
from typing import NamedTuple


class StageBytes(NamedTuple):
    """Live bytes of one micro-batch on a stage: after its F, and peak in F, B and W."""

    saved: float  # alive when F is done
    waiting: float  # alive from I to W, where the backward is split
    forward_peak: float  # until F is done
    backward_peak: float  # from there until B or I is done
    weight_peak: float  # within W
    sent: float  # its input's gradient, alive until the pipeline receives something else
    gathered: float = 0.0  # weights of the ends that zero=3 leaves gathered after F

    @property
    def peaks(self) -> tuple[tuple[float, float], ...]:
        """(bytes already counted as alive, peak) within F, within B or I, and within W."""
        return (
            (self.saved, self.forward_peak),
            (self.saved, self.backward_peak),
            (self.waiting, self.weight_peak),
        )


class RankBytes(NamedTuple):
    """Live bytes of a pipeline rank without weights, gradients and optimizer state."""

    stages: Sequence[StageBytes]
    update: float  # at the peak of the reduction and the update
    standing: float = 0.0  # of buffers that stay from step to step
