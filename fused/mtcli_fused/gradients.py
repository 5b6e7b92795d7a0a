"""Measures, clips and checks the gradients of each model by itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtcli_fused.model import FusedModels
from mtcli_fused.optimizers import Values, per_model


@torch.no_grad()
def grad_norms(model: FusedModels, order: float = 2.0) -> Tensor:
    """The norm of each model's gradients, [B], as torch.nn.utils.get_total_norm's."""
    rows = []
    for _, parameter, owner in model.named_slots():
        gradient = parameter.grad
        if gradient is None:
            continue
        if owner is None:
            rows.append(torch.linalg.vector_norm(gradient.flatten(1), order, 1))
        else:
            rows.append(gradient.new_zeros(model.array.size))
            rows[-1][owner] = torch.linalg.vector_norm(gradient, order)
    return torch.linalg.vector_norm(torch.stack(rows), order, 0)


def finite(model: FusedModels) -> Tensor:
    """Whether each model's gradients are finite, [B]: what `step(active=...)` takes."""
    return grad_norms(model, float("inf")).isfinite()


@torch.no_grad()
def clip_grad_norm_(model: FusedModels, max_norm: Values) -> Tensor:
    """Scales each model's gradients to its `max_norm` at most; returns their norms [B] before.

    As torch.nn.utils.clip_grad_norm_ on each model alone.
    """
    norms = grad_norms(model)
    largest: Sequence[float] = per_model(max_norm, model.array.size, "max_norm")
    limits = torch.tensor(largest, dtype=norms.dtype, device=norms.device)
    factors = (limits / (norms + 1e-6)).clamp(max=1.0)
    for _, parameter, owner in model.named_slots():
        if parameter.grad is None:
            continue
        own = (
            factors[owner] if owner is not None else factors.view(-1, *[1] * (parameter.dim() - 1))
        )
        parameter.grad.mul_(own.to(parameter.grad.dtype))
    return norms
