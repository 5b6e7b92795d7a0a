"""Defines the base class of update rules, one file each. `mesh/update_rules.py` names each
parameter's."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.parallel.matrix_exchange import MatrixUpdate
from mtcli.core.parallel.ownership import Ownership
from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors, TensorTable, tensor_table
from mtcli.kernels.triton_launch import runs_triton


class UpdateRule:
    """A rule and the tensors of a rank that it updates; ranks without such tensors have it too."""

    has_kernels = True
    """whether Triton kernels update, and multiply gradients by a step's factor"""
    reads_factor = False
    """whether these read a factor on the device, and update nothing where it is NaN"""

    def __init__(
        self,
        names: Sequence[str],
        tensors: OptimizerTensors,
        ownership: Ownership,
        config: OptimizerConfig,
        stage_names: Sequence[str],
        dtype: torch.dtype,
    ) -> None:
        """`names` are the parameters of `tensors`, in their order; `stage_names` are those of the
        rank's stages, of some of which it may own no rows. Masters are in `dtype`."""
        self.names, self.tensors, self.ownership, self.config = names, tensors, ownership, config
        self.stage_names, self.dtype = stage_names, dtype
        self.by_kernels = self.has_kernels and _share_a_launch(tensors)
        self.table: TensorTable | None = None  # made in the first step by kernels

    def step(self, gradients: Mapping[str, Tensor], update: OptimizerStep) -> MatrixUpdate | None:
        """Updates with the reduced gradients of the rule's parameters; `gradients` may have
        others. Returns the update of matrices that the caller orthogonalises first, if any."""
        if self.by_kernels and self.table is None:
            self.table = tensor_table(self.tensors)
        return self.update_([gradients[name].contiguous() for name in self.names], update)

    def multiplies(self, gradients: Mapping[str, Tensor]) -> bool:
        """Whether `step` multiplies the gradients by a step's factor: by kernels, and those that
        it widens, as a product in their dtype would be rounded."""
        return self.by_kernels or all(gradients[name].dtype != self.dtype for name in self.names)

    def widened(self, gradient: Tensor, update: OptimizerStep) -> Tensor:
        """A gradient in the dtype of masters, times the factor if it is a narrower one."""
        if gradient.dtype == self.dtype:
            return gradient
        return gradient.to(self.dtype).mul_(update.factor)

    @abstractmethod
    def update_(self, gradients: Sequence[Tensor], update: OptimizerStep) -> MatrixUpdate | None:
        """Updates the tensors in place, by mtcli's kernels where there is a `table`."""


def _share_a_launch(tensors: OptimizerTensors) -> bool:
    """Whether one kernel launch can update all tensors."""
    alike = len({weight.dtype for weight in tensors.weights}) == 1
    updated = (*tensors.masters, *tensors.weights)
    return alike and all(runs_triton(x) and x.is_contiguous() for x in updated)
