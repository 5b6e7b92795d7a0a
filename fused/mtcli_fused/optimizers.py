"""Updates B models with hyper-parameters of their own: SGD, Adam, AdamW and LAMB.

Every hyper-parameter is one value for all models or a list of B. A model's slices of all parameters
are updated by torch's fused kernels in one call with that model's scalars, so its numbers are those
of torch.optim alone, and a model that takes no part in a step is not touched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mtcli.core.config.errors import wrong
from mtcli.kernels.lamb import trust_ratios
from mtcli_fused.model import FusedModels

Values = float | Sequence[float]
Lists = list[list[Tensor]]  # of each model, its slices of all parameters


class FusedOptimizer:
    """The base of fused optimizers: slices of each model, hyper-parameters `values[name][b]`, and
    counts.

    `only` chooses parameters by name: two optimizers may have different ones of one model.
    """

    states: tuple[str, ...]  # tensors like a parameter, zero at first
    defaults: dict[str, Any]  # hyper-parameters besides lr

    def __init__(
        self,
        model: FusedModels,
        lr: Values = 1e-3,
        *,
        only: Callable[[str], bool] = lambda name: True,
        **values: Any,
    ) -> None:
        """`values` are hyper-parameters by name, each with its default in `defaults`."""
        if unknown := sorted(set(values) - set(self.defaults)):
            known = ", ".join(["lr", *self.defaults])
            raise wrong(f"unknown hyper-parameters {', '.join(unknown)}", known)
        self.size, every = model.array.size, {"lr": lr} | self.defaults | values
        self.values = {name: per_model(value, self.size, name) for name, value in every.items()}
        slots = [s for s in model.named_slots() if s[1].requires_grad and only(s[0])]
        if not slots:
            raise wrong("no parameter to train has a name that `only` takes")
        self.names, self.parameters, self.owners = zip(*slots, strict=True)
        self.counts = [0] * self.size  # updates of each model
        self.state = {
            kind: [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
            for kind in self.states
        }

    @property
    def lr(self) -> list[float]:
        """Learning rates [B]."""
        return self.values["lr"]

    @lr.setter
    def lr(self, values: Values) -> None:
        self.values["lr"] = per_model(values, self.size, "lr")

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, active: Tensor | Sequence[bool] | None = None) -> None:
        """Updates the models that are `active` [B], by default all; others keep every bit."""
        flags = active.tolist() if isinstance(active, Tensor) else active
        flags = [True] * self.size if flags is None else flags
        at = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        gradients = self._slices([_like(self.parameters[i]) for i in at], at)
        parameters = self._slices([self.parameters[i].detach() for i in at], at)
        states = {
            kind: self._slices([tensors[i] for i in at], at) for kind, tensors in self.state.items()
        }
        for b in range(self.size):
            if flags[b] and parameters[b]:
                self.counts[b] += 1
                state = {kind: lists[b] for kind, lists in states.items()}
                settings = {name: values[b] for name, values in self.values.items()}
                self.update(parameters[b], gradients[b], state, settings, self.counts[b])

    def update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        state: dict[str, list[Tensor]],
        settings: dict[str, Any],
        count: int,
    ) -> None:
        """Updates one model in place, for the `count`th time."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters, counts [B], and tensors by parameter name, each [B, ...]."""
        tensors = {k: dict(zip(self.names, v, strict=True)) for k, v in self.state.items()}
        values = {name: list(value) for name, value in self.values.items()}
        return {"values": values, "counts": list(self.counts), "state": tensors}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restores what `state_dict` has returned."""
        self.values = {name: list(value) for name, value in saved["values"].items()}
        self.counts = list(saved["counts"])
        for kind, tensors in self.state.items():
            for name, tensor in zip(self.names, tensors, strict=True):
                tensor.copy_(saved["state"][kind][name])

    def _slices(self, tensors: Sequence[Tensor], at: Sequence[int]) -> Lists:
        return slices(tensors, [self.owners[i] for i in at], self.size)


class SGD(FusedOptimizer):
    """torch.optim.SGD, each model with its lr, momentum, dampening, weight_decay (0 each) and
    nesterov (False)."""

    states = ("momentum_buffer",)
    defaults = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}

    def update(self, parameters, gradients, state, settings, count) -> None:
        """Updates one model in place."""
        torch._fused_sgd_(
            parameters,
            gradients,
            state["momentum_buffer"] if settings["momentum"] else [],
            maximize=False,
            is_first_step=count == 1,
            **settings,
        )


class Adam(FusedOptimizer):
    """torch.optim.Adam, each model with its lr, betas (0.9, 0.999), eps (1e-8), weight_decay (0)
    and amsgrad (False)."""

    kernel = staticmethod(torch._fused_adam_)
    defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}

    @property
    def states(self) -> tuple[str, ...]:
        """The moments, and with amsgrad the largest second one."""
        return ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * any(self.values["amsgrad"]))

    def update(self, parameters, gradients, state, settings, count) -> None:
        """Updates one model in place."""
        beta1, beta2 = settings.pop("betas")
        updates = torch.full((), float(count), device=parameters[0].device)
        self.kernel(
            parameters,
            gradients,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["max_exp_avg_sq"] if settings["amsgrad"] else [],
            [updates] * len(parameters),
            beta1=beta1,
            beta2=beta2,
            maximize=False,
            **settings,
        )


class AdamW(Adam):
    """torch.optim.AdamW, as `Adam` with decoupled weight decay (0.01)."""

    kernel = staticmethod(torch._fused_adamw_)
    defaults = Adam.defaults | {"weight_decay": 1e-2}


class LAMB(FusedOptimizer):
    """LAMB (arXiv:1904.00962, algorithm 2) with a trust ratio per model and parameter.

    Moments are without bias correction and ratios within bounds, as in `mtcli train`. Models have
    their lr, betas (0.9, 0.999), eps (1e-6), weight_decay (0.01) and trust_bounds (0.01, 10).
    """

    states = ("exp_avg", "exp_avg_sq")
    defaults = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2}
    defaults |= {"trust_bounds": (0.01, 10.0)}

    def update(self, parameters, gradients, state, settings, count) -> None:
        """Updates one model in place."""
        (beta1, beta2), m, v = settings["betas"], state["exp_avg"], state["exp_avg_sq"]
        torch._foreach_lerp_(m, gradients, 1.0 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1.0 - beta2)
        root = torch._foreach_sqrt(v)
        torch._foreach_add_(root, settings["eps"])
        steps = torch._foreach_div(m, root)
        torch._foreach_add_(steps, parameters, alpha=settings["weight_decay"])
        norms = [torch.stack(torch._foreach_norm(x)) for x in (parameters, steps)]
        ratios = trust_ratios(torch.stack(norms, 1).square(), settings["trust_bounds"])
        torch._foreach_mul_(steps, list(ratios.to(steps[0].dtype).unbind()))
        torch._foreach_add_(parameters, steps, alpha=-settings["lr"])


def slices(tensors: Sequence[Tensor], owners: Sequence[int | None], size: int) -> Lists:
    """Each model's slices of tensors [B, ...], and those that are a model's alone."""
    lists: Lists = [[] for _ in range(size)]
    for tensor, owner in zip(tensors, owners, strict=True):
        if owner is not None:
            lists[owner].append(tensor)
            continue
        for own, row in zip(lists, tensor.unbind(), strict=True):
            own.append(row)
    return lists


def per_model(value: Any, size: int, name: str) -> list[Any]:
    """A value for each model: one for all, or a list or tensor of B (pairs, as betas, are one).

    Raises MtcliError where there are not B of them.
    """
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list):
        if len(value) != size:
            raise wrong(f"{name} has {len(value)} values for {size} models")
        return list(value)
    return [value] * size


def _like(parameter: Tensor) -> Tensor:
    """A parameter's gradient, laid out in memory as the parameter."""
    gradient = parameter.grad
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
