"""Optimizer state: float32 master weights, two moments, and weights rounded from the masters.

Parameters of 16 bits have a float32 master that is updated and that they are rounded from; wider
ones are their own master. How an update is made is a rule's: `adamw`, or a `Lamb`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.optim.adamw import adamw
from mtcli.core.optim.lamb import Lamb
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
        self.dtype, self.config = dtype, config
        self.named = {name: part for name, part in named.items() if part.numel()}
        self.masters = {name: _master(part) for name, part in self.named.items()}
        self.moments = {
            kind: {name: torch.zeros_like(m) for name, m in self.masters.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        self.updates = 0  # made so far, which AdamW's bias correction depends on
        decays = [ownership.table[name].decays for name in self.named]
        kinds = (self.masters, *self.moments.values(), self.named)
        self.parts = OptimizerTensors(*(list(kind.values()) for kind in kinds), decays)
        self.rule: UpdateRule = adamw
        if config.name == "lamb":
            self.rule = Lamb(self.named, ownership, config.trust_bounds)
        tensors = (*self.masters.values(), *self.named.values())
        alike = len({part.dtype for part in self.named.values()}) == 1
        self.by_kernels = alike and all(runs_triton(x) and x.is_contiguous() for x in tensors)
        self.packed: TensorTable | None = None

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float, factor: float = 1.0) -> None:
        """Updates with the reduced gradients, times a factor where kernels apply it."""
        assert factor == 1.0 or self.by_kernels, f"gradients are not scaled by {factor} on the way"
        self.updates += 1
        if self.by_kernels and self.packed is None:
            self.packed = tensor_table(self.parts)
        c = self.config
        update = OptimizerStep(lr, c.betas, c.eps, c.weight_decay, self.updates, factor)
        mine = [gradients[name].contiguous() for name in self.named]
        self.rule(self.parts, mine, update, self.packed)

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


def _master(part: Tensor) -> Tensor:
    """The weight itself, or a float32 copy of a 16-bit one."""
    return part.to(torch.promote_types(part.dtype, torch.float32))
