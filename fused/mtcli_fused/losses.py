"""Computes the loss of each model: their sum has each model's own gradients.

A mean over all rows would make every gradient 1/B of what a model alone has.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def losses(loss: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Any loss of each model's tensors, [B]; call `.sum().backward()` on it.

    `loss(*args, **kwargs)` is called once for each model, with tensors [B, ...] as their slices.
    """
    size = len(next(x for x in args if isinstance(x, Tensor)))
    return torch.stack(
        [loss(*(x[b] if isinstance(x, Tensor) else x for x in args), **kwargs) for b in range(size)]
    )


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The mean cross entropy of each model, [B], as F.cross_entropy's, in one pass for all.

    logits [B, N, K, ...] and class indices [B, N, ...] give what `losses(F.cross_entropy, ...)`
    does. Raises what F.cross_entropy raises.
    """
    each = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(0, 1),
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counted = targets != ignore_index
    if weight is not None:
        counted = weight[targets.where(counted, 0)] * counted
    return each.view(len(logits), -1).sum(1) / counted.flatten(1).sum(1)
