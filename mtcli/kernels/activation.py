"""Activations of MLPs and experts by their names in the config, with backwards that recompute."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from mtcli.kernels.gelu import gelu, gelu_backward_
from mtcli.kernels.swiglu import swiglu, swiglu_backward_


class Activation(NamedTuple):
    """y = f(x + bias), row by row; SwiGLU takes no bias.

    `backward_(gradient of y, x, bias)` returns the gradients of x and bias, and y recomputed, for
    the weight's gradient in the layer after it; it may overwrite the gradient of y.
    """

    forward: Callable[[Tensor, Tensor | None], Tensor]
    backward_: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor]]


def _swiglu_backward_(grad: Tensor, gate_up: Tensor, bias: None) -> tuple[Tensor, None, Tensor]:
    of_gate_up, y = swiglu_backward_(grad, gate_up)
    return of_gate_up, None, y


ACTIVATIONS = {
    "gelu": Activation(gelu, gelu_backward_),
    "gelu_tanh": Activation(
        partial(gelu, approximate="tanh"), partial(gelu_backward_, approximate="tanh")
    ),
    "swiglu": Activation(lambda gate_up, bias: swiglu(gate_up), _swiglu_backward_),
}
