"""Defines update rules: a file each. `mesh/update_rules.py` names that of each parameter."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.parallel.ownership import Ownership
from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors, TensorTable


class UpdateRule:
    """A rule for some of a rank's shards; every rank calls it, also with none."""

    has_kernels = True
    """whether kernels of ours update, and multiply gradients by a factor"""

    def __init__(self, names: Sequence[str], ownership: Ownership, config: OptimizerConfig) -> None:
        """`names` are those of the parameters, in the order of the tensors that calls have."""
        self.names, self.ownership, self.config = names, ownership, config

    @abstractmethod
    def __call__(
        self,
        tensors: OptimizerTensors,
        gradients: Sequence[Tensor],
        update: OptimizerStep,
        table: TensorTable | None,
    ) -> None:
        """Updates in place, by our kernels where the `table` of the tensors is given."""
