"""Activations of MLPs and experts by their config names, with backwards that recompute the
output."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.gelu import gelu, gelu_backward_
from mtcli.kernels.gemm import DeferGradient, LinearGemms, weight_gradient
from mtcli.kernels.gradient_sink import GradientSink
from mtcli.kernels.relu2 import relu2, relu2_backward_
from mtcli.kernels.swiglu import GPT_OSS, Clamp, Gate, swiglu, swiglu_backward_


class Activation(NamedTuple):
    """y = f(x + bias), row by row; SwiGLU and GEGLU take no bias.

    `backward_(gradient of y, x, bias)` returns (gradient of x, gradient of bias, y recomputed, for
    the weight's gradient of the next layer); it may overwrite the gradient of y.
    """

    forward: Callable[[Tensor, Tensor | None], Tensor]
    backward_: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor]]


def _gated(gate: Gate, clamp: Clamp = GPT_OSS) -> Activation:
    def backward_(grad: Tensor, gate_up: Tensor, bias: None) -> tuple[Tensor, None, Tensor]:
        of_gate_up, y = swiglu_backward_(grad, gate_up, gate, clamp)
        return of_gate_up, None, y

    return Activation(lambda gate_up, bias: swiglu(gate_up, gate, clamp), backward_)


ACTIVATIONS = {
    "gelu": Activation(gelu, gelu_backward_),
    "gelu_tanh": Activation(
        partial(gelu, approximate="tanh"), partial(gelu_backward_, approximate="tanh")
    ),
    "relu2": Activation(relu2, relu2_backward_),
    "swiglu": _gated("silu"),
    "geglu": _gated("gelu"),
    "geglu_tanh": _gated("gelu_tanh"),
}


def activation_of(name: str, clamp: tuple[float, float]) -> Activation:
    """The activation of a config's name; `clamp` is the (limit, alpha) of "swiglu_clamped"."""
    return _gated("clamped", Clamp(*clamp)) if name == "swiglu_clamped" else ACTIVATIONS[name]


class ActivatedLinear(torch.autograd.Function):
    """activation(x + bias) weight^T, which saves x alone for backward.

    x [T, F] ([T, 2F] with a gate), weight [D, F] -> [T, D]. One kernel recomputes the activation
    for the weight's gradient and computes the activation's gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no containers of tensors
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        activation: Activation,
        gemms: LinearGemms,
        defer: DeferGradient | None = None,
        sink: GradientSink | None = None,
    ) -> Tensor:
        """Returns the layer's output, without an output bias."""
        ctx.save_for_backward(x, bias, weight)
        ctx.activation, ctx.gemms, ctx.defer, ctx.sink = activation, gemms, defer, sink
        return gemms.forward(activation.forward(x, bias), weight, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, bias and, if it is trained, weight."""
        x, bias, weight = ctx.saved_tensors
        of_y = ctx.gemms.dgrad(grad, weight)
        of_x, of_bias, y = ctx.activation.backward_(of_y, x, bias)
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = weight_gradient(ctx.gemms, ctx.defer, ctx.sink, weight, grad, y)
        return of_x, of_bias, of_weight, None, None, None, None
