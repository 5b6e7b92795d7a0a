"""Activations of MLPs and experts by their names in the config, with backwards that recompute."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from mtcli.kernels.gelu import Approximate, gelu, gelu_backward_
from mtcli.kernels.swiglu import swiglu, swiglu_backward_


class Activation(NamedTuple):
    """y = f(x + bias), row by row; SwiGLU takes no bias.

    `backward_(gradient of y, x, bias)` returns the gradients of x and bias, and y recomputed, for
    the weight's gradient in the layer after it; it may overwrite the gradient of y.
    """

    forward: Callable[[Tensor, Tensor | None], Tensor]
    backward_: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor]]


def _gelu(approximate: Approximate) -> Activation:
    return Activation(
        partial(gelu, approximate=approximate), partial(gelu_backward_, approximate=approximate)
    )


def _swiglu(gate_up: Tensor, bias: None) -> Tensor:
    return swiglu(gate_up)


def _swiglu_backward_(grad: Tensor, gate_up: Tensor, bias: None) -> tuple[Tensor, None, Tensor]:
    of_gate_up, y = swiglu_backward_(grad, gate_up)
    return of_gate_up, None, y


ACTIVATIONS = {
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "swiglu": Activation(_swiglu, _swiglu_backward_),
}
