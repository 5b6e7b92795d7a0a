"""Computes the sum of squares of gradients, and the factor that clips their global norm."""

import math

import torch
from torch import Tensor


def square_sum(gradients: list[Tensor] | tuple[Tensor, ...]) -> Tensor | float:
    """The sum of squares of this rank's gradients, norms in float32 or their own wider dtype,
    summed in float64; on the device, so that the host does not wait for it."""
    if not gradients:
        return 0.0
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(gradients, 2, wide)).double().square().sum()


def clip_factor(norm: float, clip: float) -> float:
    """The factor that reduces gradients of norm `norm` to `clip`, at most 1; a clip of 0 is
    none."""
    return clip / norm if clip and norm > clip else 1.0


def device_factor(sums: Tensor, clip: float, scale: float) -> Tensor:
    """The factor that clips gradients and takes a loss's `scale` from them, float32 [] on their
    device, from `sums`: of losses and of gradients' squares. NaN where one of these is not
    finite."""
    factor = (sums[1].rsqrt() * (clip or math.inf)).clamp(max=1.0 / scale)
    return factor.add(sums.sum(), alpha=0.0).float()
