"""Compares an array with its models, one by one."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mtcli.core.config.errors import wrong
from mtcli_fused.fusing import unfuse
from mtcli_fused.model import FusedModels, Shared


def verify(fused: FusedModels, *args: Any, tolerance: float = 1e-4, **kwargs: Any) -> None:
    """Runs the array and its models one by one on the same arguments, without dropout.

    Raises MtcliError where an output of a model is further off than `tolerance` of its largest
    value: a forward that mixes samples, such as a mean over the batch.
    """
    modes = {module: module.training for module in fused.modules()}
    fused.train(False)
    with torch.no_grad():
        ours = fused(*args, **kwargs)
        for b, model in enumerate(unfuse(fused)):
            arguments = tree_map(
                lambda x, b=b: x.value if isinstance(x, Shared) else x[b] if _batched(x) else x,
                (args, kwargs),
            )
            theirs = tree_leaves(model(*arguments[0], **arguments[1]))
            for i, (y, expected) in enumerate(zip(tree_leaves(ours), theirs, strict=True)):
                if isinstance(y, Tensor):
                    _compare(y[b], expected, f"output {i} of model {b}", tolerance)
    for module, mode in modes.items():
        module.training = mode


def _batched(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def _compare(y: Tensor, expected: Tensor, name: str, tolerance: float) -> None:
    if y.shape != expected.shape:
        raise wrong(f"{name} has shape {list(y.shape)} in the array, {list(expected.shape)} alone")
    largest = expected.abs().max().item() if expected.numel() else 0.0
    gap = (y - expected).abs().max().item() if expected.numel() else 0.0
    if not gap <= tolerance * max(largest, 1e-30):
        hint = "its forward mixes samples, or its parameters with the batch; keep= that module"
        raise wrong(f"{name} is {gap:g} off, of values up to {largest:g}", hint)
