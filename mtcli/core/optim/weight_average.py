"""Keeps an exponential moving average of the weights, sharded as the optimizer's state is.

After each update average = ema * average + (1 - ema) * master weight, float32 or wider. It begins
as the weights that the run starts from. Checkpoints hold it as `optimizer.ema/<parameter>`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

KIND = "ema"  # of a checkpoint's optimizer state


class WeightAverage:
    """The average of the rows that a rank owns, by parameter name; none where `ema` is 0."""

    def __init__(self, masters: Mapping[str, Tensor], ema: float) -> None:
        self.masters, self.ema = masters, ema
        self.tensors = {name: torch.zeros_like(x) for name, x in masters.items()} if ema else {}

    @torch.no_grad()
    def begin(self) -> None:
        """Begins the average from the weights."""
        for name, tensor in self.tensors.items():
            tensor.copy_(self.masters[name])

    @torch.no_grad()
    def update(self) -> None:
        """Adds the weights after an update."""
        if self.tensors:
            weights = [self.masters[name] for name in self.tensors]
            torch._foreach_lerp_(list(self.tensors.values()), weights, 1.0 - self.ema)

    def state(self) -> dict[str, Tensor]:
        """The average for a checkpoint: `ema/<name>`."""
        return {f"{KIND}/{name}": tensor for name, tensor in self.tensors.items()}
