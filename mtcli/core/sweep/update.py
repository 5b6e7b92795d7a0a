"""AdamW (arXiv:1711.05101) of all models of an array as one graph, where steps are compiled on CPU.

Each model has its own learning rate, betas, eps, decay, clipping and count of updates. A run alone
uses torch's fused kernel (optim/adamw.py), which takes one learning rate: of B models that is 2 B
launches, and a pass over the gradients to clip them before.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.sweep.array_memory import ArrayMemory
from mtcli.core.training.compile import as_graph


class ModelUpdate(NamedTuple):
    """One model's update."""

    optimizer: OptimizerConfig
    lr: float
    factor: float  # of its gradients
    updates: int  # that the model has made, with this one


class CompiledAdamW:
    """The norms of an array's gradients, and its update, as two graphs."""

    def __init__(
        self, memory: ArrayMemory, decays: Mapping[str, bool], backend: str = "inductor"
    ) -> None:
        self.names = list(memory.weights.tensors)
        self.decays = [decays[name] for name in self.names]
        arrays = (memory.masters, *memory.moments.values())
        state = (list(array.tensors.values()) for array in arrays)
        self.masters, self.exp_avgs, self.exp_avg_sqs = state
        has_own = memory.masters is not memory.weights
        self.weights = list(memory.weights.tensors.values()) if has_own else []
        self.dtype = memory.masters.flat.dtype
        self._norms = as_graph(_norms, backend)
        self._update = as_graph(_update, backend)

    @torch.no_grad()
    def norms(self, gradients: Mapping[str, Tensor]) -> list[float]:
        """As `ArrayMemory.norms`."""
        norms: list[float] = self._norms([gradients[n] for n in self.names], self.dtype).tolist()
        return norms

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], models: Sequence[ModelUpdate | None]) -> None:
        """Updates in place; models of None stay as they are, whatever their gradients."""
        numbers_BK = torch.tensor([_numbers(model) for model in models], dtype=torch.float64)
        numbers_BK = numbers_BK.to(self.dtype)
        ordered = [gradients[name] for name in self.names]
        state = self.masters, self.exp_avgs, self.exp_avg_sqs
        self._update(*state, ordered, self.weights, self.decays, numbers_BK)


def _numbers(model: ModelUpdate | None) -> list[float]:
    """The numbers that `_update` reads of a model."""
    if model is None:
        return [0.0] * 8
    (beta1, beta2), lr = model.optimizer.betas, model.lr
    of_first, of_second = (1.0 - beta**model.updates for beta in (beta1, beta2))
    shrink = 1.0 - lr * model.optimizer.weight_decay
    return [
        *(1.0, model.factor, shrink, beta1, beta2),
        *(lr / of_first, 1.0 / sqrt(of_second), model.optimizer.eps),
    ]


def _norms(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    squares = [x.flatten(1).to(dtype).square().sum(1).double() for x in gradients]
    return torch.stack(squares).sum(0).sqrt()


def _update(  # noqa: PLR0913 - dynamo guards each list of tensors
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    decays: Sequence[bool],
    numbers_BK: Tensor,
) -> None:
    columns = numbers_BK.T[..., None].unbind()
    moves, factor, shrink, beta1, beta2, rate, of_second, eps = columns
    moves = moves > 0.0
    tensors = zip(masters, exp_avgs, exp_avg_sqs, gradients, decays, strict=True)
    for number, (*state, gradient, decays_too) in enumerate(tensors):
        master, first, second = (x.flatten(1) for x in state)
        g = gradient.flatten(1).to(master.dtype) * factor
        new_first = first + (1.0 - beta1) * (g - first)
        new_second = beta2 * second + (1.0 - beta2) * g * g
        step = rate * new_first / (new_second.sqrt() * of_second + eps)
        moved = (master * shrink if decays_too else master) - step
        for x, new in ((first, new_first), (second, new_second), (master, moved)):
            x.copy_(torch.where(moves, new, x))
        if weights:
            weights[number].flatten(1).copy_(master)
