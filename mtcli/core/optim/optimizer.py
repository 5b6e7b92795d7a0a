"""Optimizer state: float32 master weights and moments, and the weights rounded from the masters.

A 16-bit parameter has a float32 master, which is updated and rounded to the parameter; a wider one
is its own master. `mesh/update_rules.py` names each parameter's rule and moments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig, OptimizerName, TrainConfig
from mtcli.core.mesh.update_rules import (
    ParameterUpdate,
    RuleFacts,
    moments_of,
    update_of,
)
from mtcli.core.optim.adamw import Adamw
from mtcli.core.optim.lamb import Lamb
from mtcli.core.optim.muon import Muon, orthogonalise_together
from mtcli.core.optim.newton_schulz import orthogonalised
from mtcli.core.optim.sgd import Sgd
from mtcli.core.optim.update_rule import UpdateRule
from mtcli.core.parallel.matrix_exchange import MatrixUpdate
from mtcli.core.parallel.ownership import Ownership
from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors

RULES: dict[OptimizerName, type[UpdateRule]] = {
    "adamw": Adamw,
    "lamb": Lamb,
    "sgd": Sgd,
    "muon": Muon,
}
# What a rule of matrices makes of a stack of them [S, M, N], which it may overwrite.
ORTHOGONALISED: dict[OptimizerName, Callable[[Tensor, OptimizerConfig], Tensor]] = {
    "muon": orthogonalised,
}


class Optimizer:
    """The optimizer of the rows that a rank owns, by parameter name."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        ownership: Ownership,
        config: OptimizerConfig,
        dtype: torch.dtype,
        moments: torch.dtype | None = None,
    ) -> None:
        """`weights` are the owned rows of parameters; the model computes in `dtype`. `moments` is
        the dtype of moments, None that of masters."""
        self.ownership, self.config, self.dtype = ownership, config, dtype
        self.updates = 0  # made so far, which AdamW's bias correction depends on
        masters = {name: _master(weight) for name, weight in weights.items() if weight.numel()}
        zeros = {
            kind: {
                name: torch.zeros_like(master, dtype=moments)
                for name, master in masters.items()
                if name in names
            }
            for kind, names in moments_of(ownership.table, config).items()
        }
        self.set_tensors(weights, masters, zeros)

    def set_tensors(
        self,
        weights: Mapping[str, Tensor],
        masters: dict[str, Tensor],
        moments: dict[str, dict[str, Tensor]],
    ) -> None:
        """Replaces the tensors to update; moments are by kind."""
        self.stage_names = list(weights)
        self.weights = {name: weights[name] for name in masters}
        self.masters, self.moments = masters, moments
        # Those of the whole model: a rule may be collective.
        trained = [name for name, parameter in self.ownership.table.items() if parameter.trained]
        alike: dict[tuple[RuleFacts, int | None], dict[str, ParameterUpdate]] = {}
        for name in trained:
            update = self.update_of(name)
            alike.setdefault(update.together, {})[name] = update
        self.rules = list(map(self._rule, alike.values()))

    def update_of(self, name: str) -> ParameterUpdate:
        """The rule of a parameter, whether it decays, and its group."""
        return update_of(self.ownership.table[name], self.config)

    def _rule(self, updates: Mapping[str, ParameterUpdate]) -> UpdateRule:
        """The rule of parameters that are updated together."""
        shared = next(iter(updates.values()))
        rule, names = shared.rule, [name for name in self.weights if name in updates]
        by_kind = (self.weights, self.masters, *(self.moments[kind] for kind in rule.moments))
        narrow, wide, *moments = ([tensors[name] for name in names] for tensors in by_kind)
        first, second = (*moments, [], [])[:2]
        decays = [updates[name].decays for name in names]
        tensors = OptimizerTensors(wide, first, second, narrow, decays)
        stage_names = [name for name in self.stage_names if name in updates]
        dtype = torch.promote_types(self.dtype, torch.float32)
        config = shared.settings(self.config)
        return RULES[rule.name](names, tensors, self.ownership, config, stage_names, dtype)

    @property
    def rule(self) -> UpdateRule:
        """The rule of all parameters."""
        (rule,) = self.rules
        return rule

    @property
    def by_kernels(self) -> bool:
        """Whether mtcli's kernels update."""
        return all(rule.by_kernels for rule in self.rules if rule.names)

    @property
    def reads_factor(self) -> bool:
        """Whether every update of the model reads its factor on the device, and does nothing where
        that is NaN."""
        return all(rule.reads_factor for rule in self.rules) and self.by_kernels

    def multiplies(self, gradients: Mapping[str, Tensor]) -> bool:
        """Whether an update multiplies the gradients by a step's factor."""
        return all(rule.multiplies(gradients) for rule in self.rules if rule.names)

    @torch.no_grad()
    def step(
        self, gradients: Mapping[str, Tensor], lr: float, factor: float | Tensor = 1.0
    ) -> None:
        """Updates with the reduced gradients, times `factor` where it `multiplies` them."""
        assert self.multiplies(gradients) or factor == 1.0, f"nothing multiplies by {factor}"
        self.finish(self.start(gradients, lr, factor))

    @torch.no_grad()
    def start(
        self, gradients: Mapping[str, Tensor], lr: float, factor: float | Tensor = 1.0
    ) -> list[MatrixUpdate]:
        """Makes a step but for matrices to be orthogonalised, and returns their updates."""
        update = self.begin(lr, factor)
        updates = [
            rule.step(gradients, update._replace(**self._scalars(rule.config, lr)))
            for rule in self.rules
        ]
        return [matrices for matrices in updates if matrices is not None]

    def finish(self, updates: Sequence[MatrixUpdate]) -> None:
        """Orthogonalises the matrices of updates that were started, of this model or also of others
        with the same rule."""
        if updates:
            rule = ORTHOGONALISED[self.config.name]
            orthogonalise_together(updates, lambda stack: rule(stack, self.config))

    def begin(self, lr: float, factor: float | Tensor = 1.0) -> OptimizerStep:
        """Counts an update, and returns its scalars."""
        self.updates += 1
        return OptimizerStep(count=self.updates, factor=factor, **self._scalars(self.config, lr))

    def _scalars(self, settings: OptimizerConfig, lr: float) -> dict[str, Any]:
        """A rule's scalars where the optimizer's learning rate is `lr`."""
        peak = self.config.lr
        rate = lr * settings.lr / peak if settings.lr != peak and peak else lr
        decay = settings.weight_decay
        return {"lr": rate, "betas": settings.betas, "eps": settings.eps, "decay": decay}

    def round_(self) -> None:
        """Rounds the masters to the weights, where they are different tensors."""
        for rule in self.rules:
            rule.tensors.round_()

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Copies the weights to the masters, after the weights were loaded or initialised."""
        for name, master in self.masters.items():
            master.copy_(self.weights[name])

    def state(self) -> dict[str, Tensor]:
        """The optimizer state for a checkpoint: `<kind>/<name>`."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            kinds = {kind: x[name] for kind, x in self.moments.items() if name in x}
            tensors |= {f"{kind}/{name}": moment for kind, moment in kinds.items()}
            if master.dtype != self.dtype:
                tensors[f"master/{name}"] = master
        return tensors


def moment_dtype(train: TrainConfig) -> torch.dtype | None:
    """The dtype of a run's moments; None is that of masters."""
    return torch.bfloat16 if train.moments == "bf16" else None


def _master(weight: Tensor) -> Tensor:
    """The weight itself, or a float32 copy of a 16-bit one."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
