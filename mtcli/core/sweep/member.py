"""One model of an array: what a run of its own would have, over its rows of the array's memory.

It is the run that checkpoints capture and restore, with its own step, loss scale and updates.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig, RunConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.optim.adamw import adamw
from mtcli.core.optim.lamb import Lamb
from mtcli.core.optim.loss_scale import LossScale
from mtcli.core.optim.optimizer import UpdateRule
from mtcli.core.optim.sgd import Sgd
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.ownership import OwnedShard, Ownership
from mtcli.core.sweep.memory import ModelRow, RowLayout
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.strategy import Strategy
from mtcli.kernels.launch import runs_triton
from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors, TensorTable, tensor_table


class RowStrategy(Strategy):
    """The weights and gradients of one model, which the array has reduced."""

    recorded = True

    def __init__(self, rows: RowLayout, ownership: Ownership) -> None:
        self.rows, self.ownership, self.stages = rows, ownership, {}

    def bind(self, row: ModelRow) -> None:
        """Takes the rows of the model, which move where an array is compacted."""
        self.row = row
        weights = self.rows.views(row.weights)
        self.shards = {name: OwnedShard(x, slice(0, len(x))) for name, x in weights.items()}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The reduced gradients by name."""
        return self.rows.views(self.row.gradients)

    def scale_gradients_(self, factor: float) -> None:
        """Multiplies the reduced gradients, as clipping does."""
        self.row.gradients.mul_(factor)

    def saves(self, name: str) -> bool:
        """Whether this rank is the first that has the parameter."""
        return self.ownership.answers_for(name)


class RowOptimizer:
    """The optimizer of one model: the rule that a run alone has, over rows of the array."""

    def __init__(
        self, rows: RowLayout, ownership: Ownership, config: OptimizerConfig, dtype: torch.dtype
    ) -> None:
        self.rows, self.ownership, self.config, self.dtype = rows, ownership, config, dtype
        self.updates = 0  # made so far, which AdamW's bias correction depends on
        self.by_parameter = config.name == "lamb"  # whose ratios are of each parameter

    def bind(self, row: ModelRow) -> None:
        """Takes the rows of the model."""
        self.row = row
        self.parts = self._parts()
        masters = self.parts.masters
        has_kernels = self.config.name != "sgd"
        self.by_kernels = has_kernels and all(map(runs_triton, masters))
        self.packed: TensorTable | None = None
        self.rule = self._rule()

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float, factor: float = 1.0) -> None:
        """Updates with the reduced gradients, times a factor where kernels apply it."""
        assert factor == 1.0 or self.by_kernels, f"gradients are not scaled by {factor} on the way"
        if self.by_kernels and self.packed is None:
            self.packed = tensor_table(self.parts)
        self.updates += 1
        c = self.config
        update = OptimizerStep(lr, c.betas, c.eps, c.weight_decay, self.updates, factor)
        self.rule(self.parts, self._split(self.row.gradients), update, self.packed)

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Copies the master weights from the parameters, after these were filled."""
        if self.row.masters is not self.row.weights:
            self.row.masters.copy_(self.row.weights)

    def state(self) -> dict[str, Tensor]:
        """The optimizer state for a checkpoint: `<kind>/<name>`."""
        kinds = dict(self.row.moments)
        if self.row.masters.dtype != self.dtype:
            kinds["master"] = self.row.masters
        views = {kind: self.rows.views(x) for kind, x in kinds.items()}
        return {
            f"{kind}/{name}": x for kind, by_name in views.items() for name, x in by_name.items()
        }

    def _split(self, row: Tensor) -> list[Tensor]:
        """What the rule goes over one after another of a row."""
        return list(self.rows.views(row).values()) if self.by_parameter else self.rows.halves(row)

    def _parts(self) -> OptimizerTensors:
        row, decays = self.row, [True, False]
        if self.by_parameter:
            decays = [self.rows.table[name].decays for name in self.rows.slots]
        first, second = [*(self._split(x) for x in row.moments.values()), [], []][:2]
        masters, weights = self._split(row.masters), self._split(row.weights)
        return OptimizerTensors(masters, first, second, weights, decays)

    def _rule(self) -> UpdateRule:
        config = self.config
        if config.name == "lamb":
            return Lamb(self.rows.slots, self.ownership, config.trust_bounds)
        return Sgd(config.momentum, config.nesterov) if config.name == "sgd" else adamw


class Member:
    """The state of one model's run, at the step of its array."""

    def __init__(
        self, config: RunConfig, groups: Groups, rows: RowLayout, dtype: torch.dtype
    ) -> None:
        self.config, self.groups, self.dtype, self.table = config, groups, dtype, rows.table
        ownership = Ownership(groups, rows.table, config.parallel.sequence_parallel, shard=False)
        self.strategy = RowStrategy(rows, ownership)
        self.optimizer = RowOptimizer(rows, ownership, config.optimizer, dtype)
        self.exchange = ReplicaExchange(self.strategy, self.optimizer)
        self.loss_scale = LossScale.of(config.train)
        self.step = 0

    def bind(self, row: ModelRow) -> None:
        """Takes the rows of this model, which move where an array is compacted."""
        self.strategy.bind(row)
        self.optimizer.bind(row)

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the array."""
        return self.groups.layout

    @property
    def consumed_samples(self) -> int:
        """Sequences trained on so far."""
        return self.step * self.config.batch.global_batch_size
