"""Finds the first tensor of a model that has a NaN or an infinity, once its logits have one."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mtcli.core.inference.model import InferenceModel
from mtcli.kernels.stored_weight import StoredWeight


class NonFinite(NamedTuple):
    """The first tensor with a NaN or an infinity, and a hint."""

    what: str
    hint: str


def first_nonfinite(model: InferenceModel, again: Callable[[], object]) -> NonFinite:
    """Names the first weight that is not finite, else the first module whose output is not.

    `again` repeats the forward pass. Collective.
    """
    if weight := _first(model, _bad_weights(model)):
        return NonFinite(
            f"the weight {weight} has NaN or infinity",
            "take an earlier checkpoint, or another copy",
        )
    seen: dict[int, str] = {}
    with ExitStack() as hooks:
        for index, stage in model.stages.items():
            for name, module in stage.named_modules():
                hook = module.register_forward_hook(_noting(seen, index, name))
                hooks.callback(hook.remove)
        again()
    output = _first(model, seen) or "the token table, the logits"
    hint = "--set train.precision=fp32; if it is, the weights are of a run that diverged"
    return NonFinite(f"all weights are finite, and the output of {output} is not", hint)


def _bad_weights(model: InferenceModel) -> dict[int, str]:
    """The first weight of each stage that is not finite, by the stage's number."""
    first: dict[int, str] = {}
    for index, stage in model.stages.items():
        names = [name for name, weight in stage.named_parameters() if not _is_finite(weight)]
        for name, module in stage.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, StoredWeight) and not weight.is_finite():
                names.append(f"{name}.weight")
        if name := next(iter(names), None):
            first[index] = name
    return first


def _noting(seen: dict[int, str], index: int, name: str) -> Callable[..., None]:
    """A hook that notes a stage's first module whose output is not finite."""

    def note(module: nn.Module, given: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        if name and not all(_is_finite(x) for x in outputs if isinstance(x, Tensor)):
            seen.setdefault(index, name)

    return note


def _is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x).all())


def _first(model: InferenceModel, names: dict[int, str]) -> str | None:
    """The name of the first stage that has one, of all ranks."""
    of_ranks = model.of_ranks(sorted(names.items()))
    bad = sorted((index, name) for of_rank in of_ranks for index, name in of_rank)
    return bad[0][1] if bad else None
