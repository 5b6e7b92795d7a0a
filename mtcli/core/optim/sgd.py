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
        tensors: OptimizerTensors,
        gradients: Sequence[Tensor],
        update: OptimizerStep,
        table: TensorTable | None,
    ) -> None:
        """Updates masters, momenta and weights in place, and writes the steps over the gradients;
        it has no kernel of ours."""
        decaying = zip(gradients, tensors.masters, tensors.decays, strict=True)
        if update.decay and (pairs := [(g, x) for g, x, decays in decaying if decays]):
            torch._foreach_add_(*map(list, zip(*pairs, strict=True)), alpha=update.decay)
        steps = momentum_steps_(gradients, tensors.exp_avgs, self.momentum, self.nesterov)
        torch._foreach_add_(list(tensors.masters), steps, alpha=-update.lr)
        tensors.round_()


def momentum_steps_(
    gradients: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float, nesterov: bool
) -> list[Tensor]:
    """Updates the momenta, and with Nesterov's the gradients, in place; returns the steps, which
    the learning rate is to be times."""
    gradients, momenta = list(gradients), list(momenta)
    if not momentum:
        return gradients
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    if not nesterov:
        return momenta
    torch._foreach_add_(gradients, momenta, alpha=momentum)
    return gradients
