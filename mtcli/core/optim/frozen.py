"""Updates by a mean momentum and a frozen variance: those of 1-bit LAMB and 1-bit Adam.

The variance v is the last one computed from uncompressed gradients (arXiv:2104.06069, algorithm 2;
arXiv:2102.02888, algorithm 1). Elements with v = 0 never had a gradient; they are updated by weight
decay alone.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.ownership import GlobalSums
from mtcli.kernels.lamb import SLICE
from mtcli.kernels.multi_tensor import OptimizerStep


def frozen_adam_(
    optimizer: Optimizer, momenta: Mapping[str, Tensor], update: OptimizerStep, frozen_at: int
) -> None:
    """Updates weights as AdamW, from new momenta and the variance of update `frozen_at`."""
    tensors = optimizer.rule.tensors
    root = (1.0 - update.betas[1] ** frozen_at) ** 0.5
    length = update.lr / (1.0 - update.betas[0] ** update.count)
    for x, m, v, decays, new in zip(*tensors[:3], tensors.decays, momenta.values(), strict=True):
        m.copy_(new)
        x.mul_(1.0 - update.lr * update.decay * decays)
        x.addcdiv_(m, (v.sqrt() / root).add_(update.eps), value=-length)
    tensors.round_()


class FrozenLamb:
    """LAMB's step from a mean momentum, with trust ratios that follow the gradients.

    A parameter's ratio is its mean of the warm-up times a factor. The factor is the largest
    quotient of the frozen and the fresh denominator, sqrt(v) + eps, where the fresh variance is
    that of gradients reconstructed from momenta: g = (m - beta1 m_before) / (1 - beta1).
    """

    bounds = 0.5, 4.0
    """of the factor"""
    threshold = 0.1
    """by which the factor may change in a step, relative"""

    def __init__(self, optimizer: Optimizer, global_sums: GlobalSums) -> None:
        self.optimizer, self.global_sums = optimizer, global_sums
        self.fresh = {name: torch.zeros_like(x) for name, x in optimizer.masters.items()}

    def freeze(self) -> None:
        """Starts the fresh variance from the frozen one."""
        for name, v in self.optimizer.moments["exp_avg_sq"].items():
            self.fresh[name].copy_(v)

    def step_(
        self,
        momenta: Mapping[str, Tensor],
        update: OptimizerStep,
        ratio: Tensor,
        factor: Tensor,
    ) -> None:
        """Updates momenta and weights. `ratio` and the last `factor`, which is overwritten, have an
        element per trained parameter of the model. Collective."""
        tensors = self.optimizer.rule.tensors
        peaks, squares = self._moments_(momenta, update)
        peak = self.global_sums.of_model(peaks, ReduceOp.MAX)[:, 0]
        of_momentum, of_step = self.global_sums.of_model(squares).sqrt().unbind(1)
        peak_or_one = torch.where(peak > 0, peak, 1.0)
        share = torch.where(of_step > 0, of_momentum / of_step, 1.0).clamp(max=1.0)
        new = (peak_or_one * share + 1.0 - share).clamp(*self.bounds)
        lowest, highest = factor * (1.0 - self.threshold), factor * (1.0 + self.threshold)
        factor.copy_(new.clamp(lowest, highest))
        lengths = (update.lr * ratio * factor)[self.global_sums.rows]
        for x, m, v, decays, length in zip(*tensors[:3], tensors.decays, lengths, strict=True):
            for at in _slices(x, m, v):
                step = torch.div(at[1], at[2].sqrt().add_(update.eps))
                step.add_(at[0], alpha=update.decay * decays)
                at[0].sub_(step.mul_(length))
        tensors.round_()

    def _moments_(
        self, momenta: Mapping[str, Tensor], update: OptimizerStep
    ) -> tuple[Tensor, Tensor]:
        """Stores the new momenta, and updates the fresh variance.

        Returns the largest quotient of the denominators [tensors, 1], and the squares of the step
        without and with decay [tensors, 2].
        """
        (beta1, beta2), eps = update.betas, update.eps
        *state, _, decay_flags = self.optimizer.rule.tensors
        tensors = *state, self.fresh.values(), momenta.values()
        device = self.global_sums.rows.device
        peaks = torch.zeros(len(decay_flags), 1, dtype=torch.float64, device=device)
        squares = torch.zeros(len(decay_flags), 2, dtype=torch.float64, device=device)
        for row, (*of_one, decays) in enumerate(zip(*tensors, decay_flags, strict=True)):
            for x, m, v, fresh, new in _slices(*of_one):
                gradient = torch.sub(new, m, alpha=beta1).div_(1.0 - beta1)
                fresh.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
                m.copy_(new)
                denominator = v.sqrt().add_(eps)
                quotient = denominator / fresh.sqrt().add_(eps)
                peak = torch.where(v > 0, quotient, 0.0).amax()
                peaks[row] = torch.maximum(peaks[row], peak)
                step = m / denominator
                decayed = torch.add(step, x, alpha=update.decay * decays)
                squares[row] += torch.stack([step.norm(), decayed.norm()]).double().square()
        return peaks, squares


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields slices of tensors to process at once; on a GPU a whole tensor."""
    size = tensors[0].numel() if tensors[0].is_cuda else SLICE
    return zip(*(x.view(-1).split(size) for x in tensors), strict=True)
