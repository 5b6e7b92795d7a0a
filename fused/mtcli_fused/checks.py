"""Says in what models differ, and which modules cannot run on the rows of many models."""

import inspect
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from mtcli_fused.table import operator_of

# A module's own dicts, which are compared and fused by what is in them.
STATE = ("_parameters", "_buffers", "_modules")
# What an operator's forward reads; a parameter or buffer besides is a subclass's own.
OF_OPERATORS = {
    "weight", "bias", "running_mean", "running_var", "num_batches_tracked", "in_proj_weight",
    "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v",
}  # fmt: skip


# What `fuse` sets on operators besides.
OWN_ATTRIBUTES = {"array", "batch_dim", "values", "without_batch", "declared"}


def structural_differences(first: nn.Module, other: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of unequal classes, children, shapes or dtypes of two modules, without children's."""
    if is_parametrized(first) and is_parametrized(other):  # whose class is each one's own
        return
    if type(first) is not type(other):
        yield type(first).__name__, type(other).__name__
    elif list(first._modules) != list(other._modules):
        yield f"children {list(first._modules)}", f"children {list(other._modules)}"
    else:
        for kind in ("_parameters", "_buffers"):
            ours, theirs = getattr(first, kind), getattr(other, kind)
            for name in dict.fromkeys([*ours, *theirs]):
                x, y = _described(ours.get(name)), _described(theirs.get(name))
                if x != y:
                    yield f"{name} {x}", f"{name} {y}"


def attribute_differences(first: nn.Module, other: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of unequal plain attributes of two modules, but for those that may vary."""
    operator = operator_of(first)
    varied = operator.varied if operator else ()
    ours, theirs = _attributes(first), _attributes(other)
    for name in dict.fromkeys([*ours, *theirs]):
        x, y = ours.get(name), theirs.get(name)
        if name not in varied and not _same(x, y):
            yield f"{name}={_shown(x)}", f"{name}={_shown(y)}"


def refusals(modules: Sequence[nn.Module]) -> Iterator[str]:
    """Why modules of one structure cannot run on the rows of all models, without children's."""
    module, operator = modules[0], operator_of(modules[0])
    name, own = type(module).__name__, vars(module)
    if any(v for k, v in own.items() if "_hooks" in k and "state_dict" not in k):
        yield f"{name} has hooks, which would get the rows of all models"
    if is_parametrized(module):
        yield f"{name} has parametrizations"
    if isinstance(module, nn.modules.loss._Loss):
        yield f"{name} reduces over the batch of all models; fused.losses is for use outside"
    in_torch = type(module).__module__.startswith("torch.nn")
    if in_torch and any(own.get(attribute) == 0 for attribute in ("dim", "start_dim")):
        yield f"{name} works along dimension 0, the batch of all models"
    yield from _options(module)
    for attribute, value in _attributes(module).items():
        if any(isinstance(x, nn.Module) for x in tree_leaves(value)):
            yield f"{name}.{attribute} has modules in a plain container, not nn.ModuleList"
    if operator and (taken := sorted(OWN_ATTRIBUTES & own.keys())):
        yield f"{name} has attributes of the names {', '.join(taken)}"
    yield from _own_tensors(modules, OF_OPERATORS if operator else set())


def _options(module: nn.Module) -> Iterator[str]:
    """Options of torch's modules that their fused forms do not have."""
    name = type(module).__name__
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq):
        yield f"{name} with max_norm or scale_grad_by_freq"
    if isinstance(module, nn.MultiheadAttention) and module.bias_k is not None:
        yield f"{name} with add_bias_kv"
    if isinstance(module, nn.MultiheadAttention) and module.add_zero_attn:
        yield f"{name} with add_zero_attn"


def unequal_buffers(modules: Sequence[nn.Module]) -> set[str]:
    """Names of the buffers that are not the same in all modules."""
    return {
        name
        for name, x in modules[0]._buffers.items()
        if x is not None and not all(torch.equal(x, m._buffers[name]) for m in modules)
    }


def _own_tensors(modules: Sequence[nn.Module], known: set[str]) -> Iterator[str]:
    """Parameters and unequal buffers that do not broadcast over the batch as [1, ..., ...]."""
    module = modules[0]
    tensors = {k: p for k, p in module._parameters.items() if p is not None}
    tensors |= {name: module._buffers[name] for name in unequal_buffers(modules) - known}
    for name in tensors.keys() - known:
        shape = list(tensors[name].shape)
        if known or len(shape) < 3 or shape[0] != 1:
            yield (
                f"{type(module).__name__} has {name} {shape} of its own, and no fused form; only "
                "[1, ..., ...], which broadcasts over the batch, needs none"
            )


def _described(x: Tensor | None) -> str:
    if x is None:
        return "None"
    frozen = " without gradient" if isinstance(x, nn.Parameter) and not x.requires_grad else ""
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}{frozen}"


def _shown(value: Any) -> str:
    return value.__name__ if inspect.isroutine(value) else reprlib.repr(value)


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
