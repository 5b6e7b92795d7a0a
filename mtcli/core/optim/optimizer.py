"""Optimizer state: float32 master weights, moments, and weights rounded from the masters.

Parameters of 16 bits have a float32 master that is updated and that they are rounded from; wider
ones are their own master. How an update is made is a rule's: `adamw`, a `Lamb` or an `Sgd`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.optim.adamw import adamw
from mtcli.core.optim.lamb import Lamb
from mtcli.core.optim.sgd import Sgd
from mtcli.core.parallel.ownership import Ownership
from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors, TensorTable, tensor_table
from mtcli.kernels.triton_launch import runs_triton

UpdateRule = Callable[[OptimizerTensors, Sequence[Tensor], OptimizerStep, TensorTable | None], None]


class Optimizer:
    """The optimizer of a rank's owned rows, by parameter name."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        ownership: Ownership,
        config: OptimizerConfig,
        dtype: torch.dtype,
    ) -> None:
        """`weights` are the owned rows of parameters; the model computes in `dtype`."""
        self.ownership, self.config, self.dtype = ownership, config, dtype
        self.updates = 0  # made so far, which AdamW's bias correction depends on
        weights = {name: weight for name, weight in weights.items() if weight.numel()}
        masters = {name: _master(weight) for name, weight in weights.items()}
        moments = {
            kind: {name: torch.zeros_like(m) for name, m in masters.items()}
            for kind in config.moments
        }
        self.set_tensors(weights, masters, moments)

    def set_tensors(
        self,
        weights: dict[str, Tensor],
        masters: dict[str, Tensor],
        moments: dict[str, dict[str, Tensor]],
    ) -> None:
        """Sets the tensors that are updated from now on; moments by kind."""
        self.weights, self.masters, self.moments = weights, masters, moments
        of_kind = [list(moment.values()) for moment in moments.values()]
        first, second = (*of_kind, [], [])[:2]  # sgd has one kind or none
        decays = [self.ownership.table[name].decays for name in weights]
        wide, narrow = list(masters.values()), list(weights.values())
        self.tensors = OptimizerTensors(wide, first, second, narrow, decays)
        self.rule = self._rule()
        self.by_kernels = self.config.name != "sgd" and _share_a_launch(self.tensors)
        self.launch_table: TensorTable | None = None  # made in the first step by kernels

    def _rule(self) -> UpdateRule:
        if self.config.name == "lamb":
            return Lamb(self.weights, self.ownership, self.config.trust_bounds)
        if self.config.name == "sgd":
            return Sgd(self.config.momentum, self.config.nesterov)
        return adamw

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float, factor: float = 1.0) -> None:
        """Updates with the reduced gradients, times a factor where kernels apply it."""
        assert factor == 1.0 or self.by_kernels, f"gradients are not scaled by {factor} on the way"
        if self.by_kernels and self.launch_table is None:
            self.launch_table = tensor_table(self.tensors)
        ordered = [gradients[name].contiguous() for name in self.weights]
        self.rule(self.tensors, ordered, self.begin(lr, factor), self.launch_table)

    def begin(self, lr: float, factor: float = 1.0) -> OptimizerStep:
        """Counts an update; returns its scalars."""
        self.updates += 1
        c = self.config
        return OptimizerStep(lr, c.betas, c.eps, c.weight_decay, self.updates, factor)

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Copies the master weights from the parameters, after these were filled."""
        for name, master in self.masters.items():
            master.copy_(self.weights[name])

    def state(self) -> dict[str, Tensor]:
        """The optimizer state for a checkpoint: `<kind>/<name>`."""
        tensors = {}
        for name, master in self.masters.items():
            tensors |= {f"{kind}/{name}": moments[name] for kind, moments in self.moments.items()}
            if master.dtype != self.dtype:
                tensors[f"master/{name}"] = master
        return tensors


def _share_a_launch(tensors: OptimizerTensors) -> bool:
    """Whether one launch of our kernels can update all tensors."""
    alike = len({weight.dtype for weight in tensors.weights}) == 1
    every = (*tensors.masters, *tensors.weights)
    return alike and all(runs_triton(x) and x.is_contiguous() for x in every)


def _master(weight: Tensor) -> Tensor:
    """The weight itself, or a float32 copy of a 16-bit one."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
