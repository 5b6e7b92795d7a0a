"""A backward pass in two halves: input gradients now, weight gradients when the schedule says.

Zero-bubble schedules (arXiv:2401.10241, section 2) put the weight half W where a rank would wait.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.swiglu import swiglu, swiglu_backward_

Work = Callable[[], None]


class Products(NamedTuple):
    """The three products of a linear layer, of x [T, D], weight [F, D] and gradient [T, F]."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) -> [T, F]
    of_x: Callable[[Tensor, Tensor], Tensor]  # (gradient, weight) -> [T, D]
    of_weight: Callable[[Tensor, Tensor], Tensor]  # (gradient, x) -> [F, D]


PLAIN = Products(
    torch.nn.functional.linear,
    lambda grad, weight: grad @ weight,
    lambda grad, x: grad.T @ x,
)


class WeightWork:
    """Collects the weight halves of a stage's linear layers while one micro-batch's I runs."""

    def __init__(self, products: Products = PLAIN) -> None:
        self.products = products
        self.pending: list[Work] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Work]]:
        """Inside, backward leaves the weight gradients of `linear` in the list it gives."""
        self.pending = []
        try:
            yield self.pending
        finally:
            self.pending = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x weight^T + bias, as F.linear: x [T, D], weight [F, D] -> [T, F]."""
        return _Linear.apply(x, weight, bias, self)

    def swiglu_linear(self, gate_up: Tensor, weight: Tensor) -> Tensor:
        """swiglu(gate_up) weight^T: gate_up [T, 2F], weight [D, F] -> [T, D].

        swiglu's result is made again for the weight's gradient, beside its own gradient.
        """
        return _SwigluLinear.apply(gate_up, weight, self)

    def weight_half(self, leaf: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
        """The weight's gradient, or None where it is left for later, for `leaf` with its graph:
        from a view, such as a flattened weight, to the parameter."""
        of_weight = self.products.of_weight
        if self.pending is None:
            return of_weight(grad, x)
        self.pending.append(lambda: torch.autograd.backward(leaf, of_weight(grad, x)))
        return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, work: WeightWork
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.work, ctx.weight = bias is not None, work, weight
        return work.products.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_bias = grad.sum(0) if ctx.has_bias else None
        of_x = ctx.work.products.of_x(grad, weight)
        return of_x, ctx.work.weight_half(ctx.weight, grad, x), of_bias, None


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, work: WeightWork) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.work, ctx.weight = work, weight
        return work.products.forward(swiglu(gate_up), weight, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up, weight = ctx.saved_tensors
        of_gate_up, x = swiglu_backward_(ctx.work.products.of_x(grad, weight), gate_up)
        return of_gate_up, ctx.work.weight_half(ctx.weight, grad, x), None
