"""SGD with momentum, as torch.optim.SGD without dampening: m = momentum m + g, x = x - lr m.

With Nesterov's momentum the step is lr (g + momentum m) (Sutskever et al., 2013). Weight decay is
added to the gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors, TensorTable


class Sgd:
    """The update rule; it holds no state."""

    def __init__(self, momentum: float, nesterov: bool) -> None:
        self.momentum, self.nesterov = momentum, nesterov

    def __call__(
        self,
        parts: OptimizerTensors,
        gradients: Sequence[Tensor],
        update: OptimizerStep,
        packed: TensorTable | None,
    ) -> None:
        """Updates masters, momenta and weights in place."""
        steps = self.steps_(parts, gradients, update)
        torch._foreach_add_(list(parts.masters), steps, alpha=-update.lr)
        parts.round_()

    def steps_(
        self, parts: OptimizerTensors, gradients: Sequence[Tensor], update: OptimizerStep
    ) -> list[Tensor]:
        """Updates the momenta; returns the steps, which the learning rate is to be times."""
        decayed = decayed_gradients(parts, gradients, update)
        if not self.momentum:
            return decayed
        momenta = list(parts.exp_avgs)
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, decayed)
        if not self.nesterov:
            return momenta
        return list(torch._foreach_add(decayed, momenta, alpha=self.momentum))


def decayed_gradients(
    parts: OptimizerTensors, gradients: Sequence[Tensor], update: OptimizerStep
) -> list[Tensor]:
    """The gradients times the update's factor, plus weight decay."""
    scaled = list(gradients)
    if update.factor != 1.0:
        scaled = list(torch._foreach_mul(scaled, update.factor))
    if not update.decay:
        return scaled
    return [
        torch.add(g, master, alpha=update.decay) if decays else g
        for g, master, decays in zip(scaled, parts.masters, parts.decays, strict=True)
    ]
