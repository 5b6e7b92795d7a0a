"""The feed-forward part of a block, with a gate (arXiv:2002.05202) or without."""

from typing import cast

from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.model.inputs import Inputs
from mtcli.core.parallel.factory import LayerFactory
from mtcli.kernels.activation import activation_of
from mtcli.kernels.triton_launch import runs_triton


class Mlp(nn.Module):
    """Computes down(activation(up(x))), such as GELU's."""

    def __init__(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        super().__init__()
        self.up = build.column_linear(f"{name}.up")
        self.down = build.row_linear(f"{name}.down")
        self.activation = activation_of(model.activation, model.activation_clamp)

    @property
    def output_bias(self) -> Tensor | None:
        """The bias [D] of `down`, which a caller may add, or None."""
        return cast(Tensor | None, self.down.flat_bias)

    def forward(self, x_TD: Tensor, inputs: Inputs, with_bias: bool = True) -> Tensor:
        """x_TD [T/tp, D] -> [T/tp, D]."""
        return self.finish(self.begin(x_TD, inputs), inputs, with_bias)

    def begin(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """Returns up(x) [T, F/tp].

        On a GPU the kernel of the activation adds the bias: its gradient needs no extra pass.
        """
        with_bias = not runs_triton(x_TD)
        return cast(Tensor, self.up(x_TD, with_bias=with_bias, numbers=inputs.numbers))

    def finish(self, inner_TF: Tensor, inputs: Inputs, with_bias: bool = True) -> Tensor:
        """Returns down(activation(inner)) [T/tp, D] of what `begin` returned."""
        bias = self.up.flat_bias if runs_triton(inner_TF) else None
        options = {"with_bias": with_bias, "numbers": inputs.numbers}
        return cast(Tensor, self.down.of_activated(self.activation, inner_TF, bias, **options))


class GatedMlp(nn.Module):
    """Computes down(activation(gate(x)) * up(x)), with gate and up in one GEMM."""

    def __init__(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        super().__init__()
        self.gate_up = build.column_linear(f"{name}.gate_up")
        self.down = build.row_linear(f"{name}.down")
        self.activation = activation_of(model.activation, model.activation_clamp)

    @property
    def output_bias(self) -> Tensor | None:
        """The bias [D] of `down`, which a caller may add, or None."""
        return cast(Tensor | None, self.down.flat_bias)

    def forward(self, x_TD: Tensor, inputs: Inputs, with_bias: bool = True) -> Tensor:
        """x_TD [T/tp, D] -> [T/tp, D]."""
        return self.finish(self.begin(x_TD, inputs), inputs, with_bias)

    def begin(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """Returns gate and up of x [T, 2F/tp]."""
        inner = self.gate_up(x_TD, numbers=inputs.numbers)
        return cast(Tensor, inner)

    def finish(self, inner_TF: Tensor, inputs: Inputs, with_bias: bool = True) -> Tensor:
        """Returns down(activation(inner)) [T/tp, D] of what `begin` returned."""
        options = {"with_bias": with_bias, "numbers": inputs.numbers}
        return cast(Tensor, self.down.of_activated(self.activation, inner_TF, **options))
