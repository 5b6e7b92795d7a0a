"""Says in what models differ, and which modules cannot run on the rows of many models."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mtcli.core.sweep.fused.table import operator_of

# A module's own dicts, which are compared and fused by what is in them.
STATE = ("_parameters", "_buffers", "_modules")


def differences(first: nn.Module, other: nn.Module) -> Iterator[tuple[str, str]]:
    """What is not the same in two modules, each as a pair of values."""
    if type(first) is not type(other):
        yield type(first).__name__, type(other).__name__
        return
    if list(first._modules) != list(other._modules):
        yield f"children {list(first._modules)}", f"children {list(other._modules)}"
        return
    tensors = False
    for kind in ("_parameters", "_buffers"):
        ours, theirs = getattr(first, kind), getattr(other, kind)
        for name in dict.fromkeys([*ours, *theirs]):
            x, y = _described(ours.get(name)), _described(theirs.get(name))
            if x != y:
                tensors = True
                yield f"{name} {x}", f"{name} {y}"
    if tensors:  # whose sizes are attributes too
        return
    free = getattr(operator_of(first), "varied", ())
    ours, theirs = _attributes(first), _attributes(other)
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in free and not _same(ours.get(name), theirs.get(name)):
            yield f"{name}={ours.get(name)!r}", f"{name}={theirs.get(name)!r}"


def _described(x: Tensor | None) -> str:
    if x is None:
        return "None"
    trained = "" if x.requires_grad or not isinstance(x, nn.Parameter) else " without gradient"
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}{trained}"


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of a module: all but its state and what torch keeps of hooks."""
    return {k: v for k, v in vars(module).items() if k not in STATE and "_hooks" not in k}


def _same(x: Any, y: Any) -> bool:
    """Whether two attributes are equal, as far as that can be known."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and torch.equal(x, y)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, dict) and isinstance(y, dict):
        return list(x) == list(y) and all(map(_same, x.values(), y.values()))
    if inspect.isfunction(x) and inspect.isfunction(y):
        return x.__code__ is y.__code__
    if inspect.isbuiltin(x):
        return x is y
    if isinstance(x, bool | int | float | str | type | None):
        return x == y
    return type(x) is type(y)


def refusals(module: nn.Module) -> Iterator[str]:
    """Why a module cannot run on the rows of all models."""
    name = type(module).__name__
    if any(v for k, v in vars(module).items() if "_hooks" in k and "state_dict" not in k):
        yield f"{name} has hooks, which would see all models' rows"
    if isinstance(module, nn.modules.loss._Loss):
        yield f"{name} reduces over the batch of all models: compute losses outside, fused.losses"
    if "torch.nn" in type(module).__module__ and 0 in (
        vars(module).get("dim"), vars(module).get("start_dim")
    ):  # fmt: skip
        yield f"{name} works along dimension 0, the batch of all models"
    operator = operator_of(module)
    own = set(module._parameters) | set(module._buffers)
    if operator and (extra := sorted(own - set(_of_torch(operator)))):
        yield f"{name} has {', '.join(extra)} besides what torch's has"
    if vars(module).get("max_norm") is not None or vars(module).get("scale_grad_by_freq"):
        yield f"{name} with max_norm or scale_grad_by_freq"
    if isinstance(module, nn.MultiheadAttention) and (
        module.bias_k is not None or module.add_zero_attn
    ):
        yield f"{name} with add_bias_kv or add_zero_attn"
    for attribute, value in _attributes(module).items():
        if any(isinstance(x, nn.Module) for x in tree_leaves(value)):
            yield f"{name}.{attribute} has modules in a plain container: use nn.ModuleList"


def _of_torch(operator: type) -> tuple[str, ...]:
    return (
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked", "in_proj_weight",
        "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v",
    )  # fmt: skip
