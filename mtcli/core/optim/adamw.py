"""AdamW (arXiv:1711.05101) over float32 masters, by torch's fused kernel on CPU, by ours on a GPU.

Torch's is called directly: making a torch.optim.AdamW imports torch._dynamo, 0.9 s of start-up.

Parameters of 16 bits have a float32 master that the update is made on and that they are rounded
from; wider ones are their own master.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtcli.core.spec.config import OptimizerConfig
from mtcli.core.spec.sharding import Parameter
from mtcli.kernels.adamw import Parts, Update, adamw_
from mtcli.kernels.launch import runs_triton
from mtcli.kernels.packed import Packed, pack


class AdamW:
    """The optimizer of the parts of parameters that this rank updates, by canonical name."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        table: Mapping[str, Parameter],
        config: OptimizerConfig,
        dtype: torch.dtype,
    ) -> None:
        """`named` are the parts that this rank updates; the model computes in `dtype`."""
        self.dtype = dtype
        self.named = {name: part for name, part in named.items() if part.numel()}
        self.masters = {name: _master(part) for name, part in self.named.items()}
        self.moments = {
            kind: {name: torch.zeros_like(m) for name, m in self.masters.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        self.count = torch.zeros((), dtype=torch.float32)  # updates made
        self.config = config
        self.decays = {name for name in self.masters if table[name].decays}
        held = (*self.masters.values(), *self.named.values())
        self.packed: Packed | None = None
        alike = len({part.dtype for part in self.named.values()}) == 1
        self.in_one_launch = alike and all(runs_triton(x) and x.is_contiguous() for x in held)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float, factor: float = 1.0) -> None:
        """One update with the reduced gradients, times a factor where it is one launch."""
        self.count += 1
        if self.in_one_launch:
            return self._launch(gradients, lr, factor)
        assert factor == 1.0, f"gradients are not scaled by {factor} on the way"
        for names, decay in self._groups():
            self._update(names, gradients, lr, decay)
        for name, master in self.masters.items():
            if master.dtype != self.named[name].dtype:
                self.named[name].copy_(master)

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Takes the masters from the parameters, after these were filled."""
        for name, master in self.masters.items():
            master.copy_(self.named[name])

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint holds besides the weights: `<kind>/<name>`."""
        tensors = {}
        for name, master in self.masters.items():
            tensors |= {f"{kind}/{name}": moments[name] for kind, moments in self.moments.items()}
            if master.dtype != self.dtype:
                tensors[f"master/{name}"] = master
        return tensors

    @property
    def updates(self) -> int:
        """Updates made, which bias correction depends on."""
        return int(self.count)

    def set_updates(self, updates: int) -> None:
        """Sets the number of updates made."""
        self.count.fill_(updates)

    def _launch(self, gradients: Mapping[str, Tensor], lr: float, factor: float) -> None:
        masters, moments = list(self.masters.values()), self.moments.values()
        if self.packed is None:
            self.packed = pack(masters)
        tensors = (masters, *(list(kind.values()) for kind in moments), list(self.named.values()))
        parts = Parts(*tensors, [name in self.decays for name in self.named])
        c = self.config
        update = Update(lr, c.betas, c.eps, c.weight_decay, self.updates, factor)
        gradients = {name: gradients[name].contiguous() for name in self.named}
        adamw_(self.packed, parts, list(gradients.values()), update)

    def _groups(self) -> list[tuple[list[str], float]]:
        """Names and their weight decay."""
        decays = [name for name in self.masters if name in self.decays]
        others = [name for name in self.masters if name not in self.decays]
        groups = [(decays, self.config.weight_decay), (others, 0.0)]
        return [(names, decay) for names, decay in groups if names]

    def _update(
        self, names: list[str], gradients: Mapping[str, Tensor], lr: float, decay: float
    ) -> None:
        device = self.masters[names[0]].device
        torch._fused_adamw_(
            [self.masters[name] for name in names],
            [gradients[name] for name in names],
            [self.moments["exp_avg"][name] for name in names],
            [self.moments["exp_avg_sq"][name] for name in names],
            [],
            [self.count.to(device)] * len(names),
            lr=lr,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            weight_decay=decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
        )


def _master(part: Tensor) -> Tensor:
    """The part itself, or a float32 copy of a 16-bit one."""
    return part.to(torch.promote_types(part.dtype, torch.float32))
