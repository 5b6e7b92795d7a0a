"""AdamW (arXiv:1711.05101), by torch's fused kernel on CPU and mtcli's on a GPU.

torch's kernel is called directly: constructing a torch.optim.AdamW imports torch._dynamo, 0.9 s of
start-up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtcli.core.optim.update_rule import UpdateRule
from mtcli.kernels.adamw import adamw_
from mtcli.kernels.multi_tensor import OptimizerStep


class Adamw(UpdateRule):
    """The update rule of AdamW, which has no state of its own."""

    reads_factor = True

    def update_(self, gradients: Sequence[Tensor], update: OptimizerStep) -> None:
        """Updates in place; see UpdateRule."""
        tensors = self.tensors
        if self.table is not None:
            return adamw_(self.table, tensors, gradients, update)
        for decays in (True, False):
            at = [i for i, flag in enumerate(tensors.decays) if flag == decays]
            kinds = [[kind[i] for i in at] for kind in (*tensors[:3], gradients)]
            if at and len({kind[0].dtype for kind in kinds}) == 1:
                _by_torch(kinds, decays, update)
            else:
                for master, *moments, gradient in zip(*kinds, strict=True):
                    wide = [moment.to(master.dtype) for moment in moments]
                    wide_gradient = self.widened(gradient, update)
                    _by_torch([[x] for x in (master, *wide, wide_gradient)], decays, update)
                    torch._foreach_copy_(moments, wide)
        tensors.round_()


def _by_torch(kinds: list[list[Tensor]], decays: bool, update: OptimizerStep) -> None:
    """Updates masters and both moments of parameters that all decay, or all do not."""
    masters, exp_avgs, exp_avg_sqs, gradients = kinds
    count = torch.full((), float(update.count), device=masters[0].device)
    torch._fused_adamw_(
        masters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [count] * len(masters),
        lr=update.lr,
        beta1=update.betas[0],
        beta2=update.betas[1],
        weight_decay=update.decay * decays,
        eps=update.eps,
        amsgrad=False,
        maximize=False,
    )
