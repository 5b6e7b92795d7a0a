"""The memory of an array of B models: every parameter's B values follow each other, [B, ...].

So batched GEMMs read weights where they are: torch copies operands whose models are further apart
than one model's matrix. Each kind of tensor is one allocation.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig, TrainConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.mesh.update_rules import moments_of
from mtcli.core.optim.optimizer import moment_dtype
from mtcli.kernels.gemm import DTYPES

ALIGNMENT = 16  # elements: 64 bytes of float32, a cache line

Tensors = dict[str, Tensor]  # by parameter


class ModelTensors(NamedTuple):
    """One model's tensors by parameter: views of the array's."""

    weights: Tensors  # that are trained
    masters: Tensors  # the weights themselves, unless these have 16 bits
    gradients: Tensors
    moments: dict[str, Tensors]  # by kind
    frozen: Tensors  # weights that all models share; the first model has them, for all


class ParameterArray:
    """A tensor [B, ...] for every parameter, in one allocation of zeros."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], models: int, like: Tensor) -> None:
        """`like` has the dtype and device."""
        self.shapes, self.models = shapes, models
        sizes = {name: models * prod(shape) for name, shape in shapes.items()}
        self.flat = like.new_zeros(sum(map(_aligned, sizes.values())))
        self.tensors: Tensors = {}
        offset = 0
        for name, size in sizes.items():
            part = self.flat[offset : offset + size]
            self.tensors[name] = part.view(models, *shapes[name])
            offset += _aligned(size)

    def model(self, index: int) -> Tensors:
        """One model's tensors: views."""
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    def kept(self, keep: Tensor) -> "ParameterArray":
        """A copy of some models."""
        subset = ParameterArray(self.shapes, len(keep), self.flat)
        for name, tensor in self.tensors.items():
            torch.index_select(tensor, 0, keep, out=subset.tensors[name])
        return subset


class ArrayMemory:
    """Weights, gradients and optimizer state of B models.

    Weights are of the model's dtype; all else is in float32 at least, but for what `train` names
    otherwise. Frozen weights, which adapters are trained for, exist once: [1, ...].
    """

    def __init__(
        self,
        table: Mapping[str, Parameter],
        layout: ParallelLayout,
        models: int,
        optimizer: OptimizerConfig,
        like: Tensor,
        train: TrainConfig,
    ) -> None:
        """`like` has the weights' dtype and device."""
        wide = like.to(torch.promote_types(like.dtype, torch.float32))
        moments = wide.to(moment_dtype(train) or wide.dtype)
        sums = like.to(torch.promote_types(like.dtype, DTYPES[train.gradients]))
        stored = {name: described.stored_shape(layout) for name, described in table.items()}
        shapes = {name: shape for name, shape in stored.items() if not table[name].frozen}
        frozen = {name: shape for name, shape in stored.items() if table[name].frozen}
        self.frozen = ParameterArray(frozen, 1, like)
        self.weights = ParameterArray(shapes, models, like)
        self.masters = self.weights
        if wide.dtype != like.dtype:
            self.masters = ParameterArray(shapes, models, wide)
        self.gradients = ParameterArray(shapes, models, sums)
        self.moments = {
            kind: ParameterArray({n: shapes[n] for n in shapes if n in names}, models, moments)
            for kind, names in moments_of(table, optimizer).items()
        }

    @property
    def parameters(self) -> Tensors:
        """The weights by parameter, [B, ...] or [1, ...]."""
        return self.weights.tensors | self.frozen.tensors

    def model(self, index: int) -> ModelTensors:
        """One model's tensors: views."""
        frozen = {} if index else self.frozen.model(0)
        moments = {kind: array.model(index) for kind, array in self.moments.items()}
        return ModelTensors(
            self.weights.model(index),
            self.masters.model(index),
            self.gradients.model(index),
            moments,
            frozen,
        )

    def compact(self, keep: Sequence[int]) -> None:
        """Keeps some models, in the order given; the memory of the others is freed."""
        at = torch.tensor(keep, dtype=torch.int64, device=self.weights.flat.device)
        own_masters = self.masters is not self.weights
        self.weights = self.weights.kept(at)
        self.masters = self.masters.kept(at) if own_masters else self.weights
        self.gradients = self.gradients.kept(at)
        self.moments = {kind: array.kept(at) for kind, array in self.moments.items()}

    def norms(self, gradients: Mapping[str, Tensor]) -> list[float]:
        """The norm of each model's gradients: a parameter's in float32 or its own wider dtype,
        summed in float64."""
        wide = self.masters.flat.dtype
        norms = [
            torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=wide)
            for gradient in gradients.values()
        ]
        return torch.stack(norms).double().square().sum(0).sqrt().tolist()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        arrays = {id(x): x for x in (self.weights, self.masters, self.gradients, self.frozen)}
        return sum(x.flat.nbytes for x in (*arrays.values(), *self.moments.values()))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
