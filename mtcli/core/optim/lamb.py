"""LAMB (arXiv:1904.00962, algorithm 2): scales each parameter's step by its trust ratio.

Moments are AdamW's without bias correction, as in arXiv:2104.06069. The step of a parameter x,
u = m / (sqrt(v) + eps) + decay * x, is multiplied by |x| / |u|, within bounds. Both norms are those
of the global parameter (`mesh/parameters.py`), on any layout: query, key and value share one ratio,
gate and up another, and all experts of a layer a third.
"""

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from mtcli.core.optim.update_rule import UpdateRule
from mtcli.core.parallel.ownership import GlobalSums
from mtcli.kernels.lamb import (
    lamb_moments_,
    lamb_moments_reference_,
    lamb_step_,
    lamb_step_reference_,
    trust_ratios,
)
from mtcli.kernels.multi_tensor import OptimizerStep


class Lamb(UpdateRule):
    """The update rule of LAMB for a rank's shards. A step is collective."""

    ratios: Tensor
    """of the last step, of every trained parameter of the model"""

    @cached_property
    def global_sums(self) -> GlobalSums:
        """Sums over all shards of each parameter."""
        return GlobalSums(self.names, self.ownership)

    def update_(self, gradients: Sequence[Tensor], update: OptimizerStep) -> None:
        """Updates in place; see UpdateRule."""
        tensors, table = self.tensors, self.table
        if table is None:
            ratios = self._ratios(lamb_moments_reference_(tensors, gradients, update))
            lamb_step_reference_(tensors, ratios, update)
        else:
            ratios = self._ratios(lamb_moments_(table, tensors, gradients, update))
            lamb_step_(table, tensors, ratios, update)

    def _ratios(self, squares: Tensor) -> Tensor:
        """The trust ratios of this rank's parameters; stores those of the whole model in
        `ratios`."""
        self.ratios = trust_ratios(self.global_sums.of_model(squares), self.config.trust_bounds)
        return self.ratios[self.global_sums.rows]
