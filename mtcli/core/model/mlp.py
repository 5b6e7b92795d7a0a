"""The feed-forward part of a block: GELU or SwiGLU (arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.model.inputs import Inputs
from mtcli.core.parallel.build import Build
from mtcli.core.parallel.tp import ColumnLinear, RowLinear
from mtcli.core.spec.model_config import ModelConfig


class Mlp(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, name: str, model: ModelConfig, build: Build) -> None:
        super().__init__()
        self.up = ColumnLinear(f"{name}.up", build)
        self.down = RowLinear(f"{name}.down", build)
        self.approximate = "tanh" if model.activation == "gelu_tanh" else "none"

    def forward(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """x_TD [T/tp, D] -> [T/tp, D]."""
        return self.down(F.gelu(self.up(x_TD), approximate=self.approximate))


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, name: str, model: ModelConfig, build: Build) -> None:
        super().__init__()
        self.gate_up = ColumnLinear(f"{name}.gate_up", build)
        self.down = RowLinear(f"{name}.down", build)

    def forward(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """x_TD [T/tp, D] -> [T/tp, D]."""
        gate, up = self.gate_up(x_TD).chunk(2, -1)
        return self.down(F.silu(gate) * up)
