"""Names what is alive in a step on a rank beside its state: what is estimated, and learned
from the real stages."""

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
        """(bytes of its own that are counted among those alive, peak) within F, B or I, and W."""
        return (
            (self.saved, self.forward_peak),
            (self.saved, self.backward_peak),
            (self.waiting, self.weight_peak),
        )


class RankBytes(NamedTuple):
    """Live bytes of a pipeline rank beside its state."""

    stages: Sequence[StageBytes]
    update: float  # at the peak of the reduction and the update
    standing: float = 0.0  # of buffers that stay from step to step
