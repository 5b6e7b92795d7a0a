"""Zero-bubble backward passes: input gradients (I) at once, weight gradients (W) when scheduled.

Zero-bubble schedules (arXiv:2401.10241, section 2) run W where a rank would be idle.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtcli.kernels.gemm import MakeGradient

WeightStep = Callable[[], None]


class WeightPasses:
    """Collects the weight gradient computations that a micro-batch's I defers to W."""

    def __init__(self) -> None:
        self.pending: list[WeightStep] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[WeightStep]]:
        """Inside, a backward appends its deferred weight gradients to the list that this yields."""
        self.pending = []
        try:
            yield self.pending
        finally:
            self.pending = None

    def gradient(self, weight: Tensor, make: MakeGradient) -> Tensor | None:
        """Returns make(), the weight's gradient, or None inside `collecting`, which defers it to W.

        W starts from the weight's node in autograd's graph, so that no copy of the weight stays
        alive. `make` must keep no graph alive.
        """
        if self.pending is None:
            return make()
        with torch.enable_grad():
            left = _Left.apply(weight, make)  # type: ignore[no-untyped-call]  # torch
        self.pending.append(partial(left.backward, left.detach()))
        return None


class _Left(torch.autograd.Function):
    """Computes dW lazily inside backward(), so that autograd assigns it without a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, make: MakeGradient) -> Tensor:
        ctx.make = make
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        return ctx.make(), None
