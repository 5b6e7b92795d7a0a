"""Zero-bubble backward passes: input gradients (I) now, weight gradients (W) when scheduled.

Zero-bubble schedules (arXiv:2401.10241, section 2) put W where a rank would wait.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

WeightStep = Callable[[], None]


class WeightPasses:
    """Collects what a stage's W passes do while a micro-batch's I runs."""

    def __init__(self) -> None:
        self.pending: list[WeightStep] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[WeightStep]]:
        """Inside, a backward leaves the gradients of weights in the list it gives."""
        self.pending = []
        try:
            yield self.pending
        finally:
            self.pending = None

    def gradient(self, weight: Tensor, make: Callable[[], Tensor]) -> Tensor | None:
        """The weight's gradient, or None where W makes it later.

        W starts from the weight's node in autograd's graph, so that no copy of the weight stays
        alive. What `make` holds has no graph.
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
    def forward(ctx: Any, weight: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.make(), None
