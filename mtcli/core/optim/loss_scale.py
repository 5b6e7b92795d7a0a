"""Scales the loss of a float16 run, so that small gradients do not underflow.

Mixed precision training (arXiv:1710.03740, section 3.2) with Megatron-LM's rule of adjustment.
"""

import math
from collections.abc import Mapping

from mtcli.core.config.schema import LOWEST_LOSS_SCALE, TrainConfig

FACTOR = 2.0  # of growing and falling: a power of two, so that scaling rounds nothing


class LossScale:
    """A loss scale; with a `window` of steps it is dynamic.

    It doubles after `window` consecutive steps without overflow. It halves at an overflow, except
    at the first `hysteresis` - 1 overflows since it last doubled.
    """

    def __init__(self, scale: float, window: float = math.inf, hysteresis: int = 1) -> None:
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.lowest = scale if math.isinf(window) else LOWEST_LOSS_SCALE
        self.good_steps, self.patience = 0, hysteresis  # overflows until it falls

    @classmethod
    def of(cls, train: TrainConfig) -> "LossScale":
        """The scale of a run: dynamic or fixed in fp16, 1 in other precisions."""
        if train.precision != "fp16":
            return cls(1.0)
        if train.loss_scale:
            return cls(train.loss_scale)
        return cls(train.initial_loss_scale, train.loss_scale_window, train.loss_scale_hysteresis)

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may be due to the scale."""
        return self.scale > self.lowest

    def update(self, overflow: bool) -> None:
        """Adjusts the scale after a step with or without an overflow of gradients."""
        if overflow:
            self.good_steps, self.patience = 0, max(self.patience - 1, 0)
            if not self.patience:
                self.scale = max(self.scale / FACTOR, self.lowest)
            return
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.scale *= FACTOR
            self.good_steps, self.patience = 0, self.hysteresis

    def state(self) -> dict[str, float] | None:
        """The state of a dynamic scale for a checkpoint; None for a fixed one."""
        if math.isinf(self.window):
            return None
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "patience": self.patience,
        }

    def load(self, state: Mapping[str, float] | None) -> None:
        """Restores a state. Does nothing to a fixed scale, and without a state (a run in another
        precision)."""
        if state and not math.isinf(self.window):
            self.scale = state["scale"]
            self.good_steps, self.patience = int(state["good_steps"]), int(state["patience"])
