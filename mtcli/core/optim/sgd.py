"""SGD with momentum, as torch.optim.SGD without dampening: m = momentum m + g, x = x - lr m.

With Nesterov's momentum the step is lr (g + momentum m) (Sutskever et al., 2013). Weight decay is
added to the gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtcli.core.optim.update_rule import UpdateRule
from mtcli.kernels.multi_tensor import OptimizerStep


class Sgd(UpdateRule):
    """The update rule of SGD, which has no state of its own and no kernel of mtcli's."""

    has_kernels = False

    def update_(self, gradients: Sequence[Tensor], update: OptimizerStep) -> None:
        """Updates masters, momenta and weights in place, and overwrites the gradients with the
        steps; see UpdateRule."""
        tensors, c = self.tensors, self.config
        if not tensors.masters:  # torch takes no empty list
            return
        decaying = zip(gradients, tensors.masters, tensors.decays, strict=True)
        if update.decay and (pairs := [(g, x) for g, x, decays in decaying if decays]):
            torch._foreach_add_(*map(list, zip(*pairs, strict=True)), alpha=update.decay)
        steps = momentum_steps_(gradients, tensors.exp_avgs, c.momentum, c.nesterov)
        torch._foreach_add_(list(tensors.masters), steps, alpha=-update.lr)
        tensors.round_()


def momentum_steps_(
    gradients: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float, nesterov: bool
) -> list[Tensor]:
    """Updates the momenta, and for Nesterov the gradients, in place; returns the steps, which the
    caller multiplies by the learning rate."""
    gradients, momenta = list(gradients), list(momenta)
    if not momentum:
        return gradients
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    if not nesterov:
        return momenta
    torch._foreach_add_(gradients, momenta, alpha=momentum)
    return gradients
