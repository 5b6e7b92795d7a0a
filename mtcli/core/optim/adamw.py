"""AdamW (arXiv:1711.05101) over float32 masters, by torch's fused kernel.

Parameters of 16 bits have a float32 master that the update is made on and that they are rounded
from; wider ones are their own master.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mtcli.core.spec.config import OptimizerConfig
from mtcli.core.spec.sharding import Parameter


class AdamW:
    """The optimizer of the parts of parameters that this rank updates, by canonical name."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        table: Mapping[str, Parameter],
        config: OptimizerConfig,
    ) -> None:
        self.named = {name: part for name, part in named.items() if part.numel()}
        self.masters = {name: _master(part) for name, part in self.named.items()}
        decays = [m for name, m in self.masters.items() if table[name].decays]
        others = [m for name, m in self.masters.items() if not table[name].decays]
        groups = [
            {"params": decays, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.update = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One update with the reduced gradients."""
        for group in self.update.param_groups:
            group["lr"] = lr
        for name, master in self.masters.items():
            master.grad = gradients[name]
        self.update.step()
        for name, master in self.masters.items():
            master.grad = None
            if master.dtype != self.named[name].dtype:
                self.named[name].copy_(master)

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Takes the masters from the parameters, after these were filled."""
        for name, master in self.masters.items():
            master.copy_(self.named[name])

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint holds besides the weights: `<kind>/<name>`.

        Moments are there before the first step too, as zeros, so that loading can fill them.
        """
        tensors = {}
        for name, master in self.masters.items():
            moments = self._moments(master)
            tensors |= {f"{kind}/{name}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
            if master.dtype != self.named[name].dtype:
                tensors[f"master/{name}"] = master.data
        return tensors

    def set_step(self, step: int) -> None:
        """Sets the number of updates made, which bias correction depends on."""
        for master in self.masters.values():
            self._moments(master)["step"].fill_(step)

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        state = self.update.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)
        return state


def _master(part: Tensor) -> Tensor:
    """The part itself, sharing its memory, or a float32 copy of a 16-bit one."""
    wide = torch.promote_types(part.dtype, torch.float32)
    return nn.Parameter(part.to(wide))
