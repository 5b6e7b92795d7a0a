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
from mtcli.kernels.launch import runs_triton
from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors, TensorTable, tensor_table

UpdateRule = Callable[[OptimizerTensors, Sequence[Tensor], OptimizerStep, TensorTable | None], None]


class Optimizer:
    """The optimizer of a rank's owned rows, by parameter name."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        ownership: Ownership,
        config: OptimizerConfig,
        dtype: torch.dtype,
    ) -> None:
        """`named` are the owned rows of parameters; the model computes in `dtype`."""
        self.ownership, self.config, self.dtype = ownership, config, dtype
        self.updates = 0  # made so far, which AdamW's bias correction depends on
        named = {name: part for name, part in named.items() if part.numel()}
        masters = {name: _master(part) for name, part in named.items()}
        moments = {
            kind: {name: torch.zeros_like(m) for name, m in masters.items()}
            for kind in moment_kinds(config)
        }
        self.set_tensors(named, masters, moments)

    def set_tensors(
        self,
        named: dict[str, Tensor],
        masters: dict[str, Tensor],
        moments: dict[str, dict[str, Tensor]],
    ) -> None:
        """Sets the tensors that are updated from now on; moments by kind."""
        config = self.config
        self.named, self.masters, self.moments = named, masters, moments
        decays = [self.ownership.table[name].decays for name in named]
        first, second = [*(list(kind.values()) for kind in moments.values()), [], []][:2]
        wide, weights = list(masters.values()), list(named.values())
        self.parts = OptimizerTensors(wide, first, second, weights, decays)
        self.rule: UpdateRule = adamw
        if config.name == "lamb":
            self.rule = Lamb(named, self.ownership, config.trust_bounds)
        elif config.name == "sgd":
            self.rule = Sgd(config.momentum, config.nesterov)
        alike = len({part.dtype for part in weights}) == 1
        has_kernels, tensors = config.name != "sgd", (*wide, *weights)
        self.by_kernels = (
            has_kernels and alike and all(runs_triton(x) and x.is_contiguous() for x in tensors)
        )
        self.packed: TensorTable | None = None

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float, factor: float = 1.0) -> None:
        """Updates with the reduced gradients, times a factor where kernels apply it."""
        assert factor == 1.0 or self.by_kernels, f"gradients are not scaled by {factor} on the way"
        if self.by_kernels and self.packed is None:
            self.packed = tensor_table(self.parts)
        update, grads = self.begin(lr, factor), [gradients[n].contiguous() for n in self.named]
        self.rule(self.parts, grads, update, self.packed)

    def begin(self, lr: float, factor: float = 1.0) -> OptimizerStep:
        """Counts an update; returns its scalars."""
        self.updates += 1
        return self.scalars(lr, factor)

    def scalars(self, lr: float, factor: float = 1.0) -> OptimizerStep:
        """The scalars of the update that was counted last."""
        c = self.config
        return OptimizerStep(lr, c.betas, c.eps, c.weight_decay, self.updates, factor)

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Copies the master weights from the parameters, after these were filled."""
        for name, master in self.masters.items():
            master.copy_(self.named[name])

    def state(self) -> dict[str, Tensor]:
        """The optimizer state for a checkpoint: `<kind>/<name>`."""
        tensors = {}
        for name, master in self.masters.items():
            tensors |= {f"{kind}/{name}": moments[name] for kind, moments in self.moments.items()}
            if master.dtype != self.dtype:
                tensors[f"master/{name}"] = master
        return tensors


def moment_kinds(config: OptimizerConfig) -> tuple[str, ...]:
    """The kinds of state that an update rule keeps besides master weights."""
    if config.name == "sgd":
        return ("momentum",) if config.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def _master(part: Tensor) -> Tensor:
    """The weight itself, or a float32 copy of a 16-bit one."""
    return part.to(torch.promote_types(part.dtype, torch.float32))
