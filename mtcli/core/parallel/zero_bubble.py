"""Zero-bubble backward passes: input gradients (I) now, weight gradients (W) when scheduled.

Zero-bubble schedules (arXiv:2401.10241, section 2) put W where a rank would wait.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtcli.kernels.activation import Activation
from mtcli.kernels.gemm import DEFAULT_GEMMS, LinearGemms

WeightStep = Callable[[], None]


class WeightPasses:
    """Collects the W passes of a stage's linear layers while a micro-batch's I runs."""

    def __init__(self, gemms: LinearGemms = DEFAULT_GEMMS) -> None:
        self.gemms = gemms
        self.pending: list[WeightStep] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[WeightStep]]:
        """Inside, backward leaves the weight gradients of `linear` in the list it gives."""
        self.pending = []
        try:
            yield self.pending
        finally:
            self.pending = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x weight^T + bias, as F.linear: x [T, D], weight [F, D] -> [T, F]."""
        return _Linear.apply(x, weight, bias, self)

    def activated_linear(
        self, activation: Activation, x: Tensor, bias: Tensor | None, weight: Tensor
    ) -> Tensor:
        """activation(x + bias) weight^T: x [T, F], of SwiGLU [T, 2F], weight [D, F] -> [T, D].

        The activation is recomputed for the weight's gradient, with its own gradient.
        """
        return _ActivatedLinear.apply(x, bias, weight, activation, self)

    def weight_half(self, weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
        """The weight's gradient, or None where W computes it later."""
        of_weight = self.gemms.wgrad
        if self.pending is None:
            return of_weight(grad, x)
        x = x.detach()  # its graph leads to the stage's input and that one's gradient
        self.leave(weight, lambda: of_weight(grad, x))
        return None

    def leave(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """Leaves the weight's gradient to W: from the weight's node in autograd's graph, so that no
        copy of the weight stays alive. What `make` holds has no graph."""
        assert self.pending is not None, "nothing collects what is left"
        with torch.enable_grad():
            left = _Left.apply(weight, make)
        self.pending.append(partial(left.backward, left.detach()))


class _Left(torch.autograd.Function):
    """Computes dW lazily inside backward(), so that autograd assigns it without a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.make(), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, work: WeightPasses
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.has_bias, ctx.work = bias is not None, work
        return work.gemms.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        (x, weight), (wanted, of_weight, of_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            ctx.work.gemms.dgrad(grad, weight) if wanted else None,
            ctx.work.weight_half(weight, grad, x) if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
        )


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        activation: Activation,
        work: WeightPasses,
    ) -> Tensor:
        ctx.save_for_backward(x, bias, weight)
        ctx.activation, ctx.work = activation, work
        return work.gemms.forward(activation.forward(x, bias), weight, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weight = ctx.saved_tensors
        of_y = ctx.work.gemms.dgrad(grad, weight)
        of_x, of_bias, y = ctx.activation.backward_(of_y, x, bias)
        of_weight = ctx.work.weight_half(weight, grad, y) if ctx.needs_input_grad[2] else None
        return of_x, of_bias, of_weight, None, None
