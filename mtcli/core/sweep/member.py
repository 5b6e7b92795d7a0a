"""Makes each model of an array a run that checkpoints capture and restore.

Its tensors are views of the array's memory; step, loss scale and count of updates are its own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtcli.core.config.phases import phases_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.optim.loss_scale import LossScale
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.optim.weight_average import WeightAverage
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.ownership import OwnedShard, Ownership
from mtcli.core.sweep.array_memory import ModelTensors
from mtcli.core.sync.methods import replica_exchange
from mtcli.core.sync.strategy import Strategy


class MemberStrategy(Strategy):
    """One model's weights, and its gradients, which the array has reduced."""

    recorded = True

    def __init__(self, ownership: Ownership) -> None:
        self.ownership, self.stages = ownership, {}

    def bind(self, tensors: ModelTensors) -> None:
        """Takes the model's tensors, which move whenever the array is compacted.

        Adapters have the width of the array's largest; the model's are a slice of its own rank.
        """
        table, layout = self.ownership.table, self.ownership.groups.layout
        shapes = {name: table[name].stored_shape(layout) for name in tensors.weights}
        self.trained = {
            name: x[tuple(map(slice, shapes[name]))] for name, x in tensors.weights.items()
        }
        self.reduced, weights = tensors.gradients, self.trained | tensors.frozen
        self.shards = {n: OwnedShard(table[n], x, slice(0, len(x))) for n, x in weights.items()}

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name."""
        return self.trained

    def gradient_buffers(self) -> list[Tensor]:
        """Lists the gradients, views of the array's."""
        return list(self.reduced.values())

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The reduced gradients by name."""
        return self.reduced

    def scale_gradients_(self, factor: float) -> None:
        """Multiplies the reduced gradients, as clipping does."""
        torch._foreach_mul_(list(self.reduced.values()), factor)

    def saves(self, name: str) -> bool:
        """Whether this rank is the first that has the parameter."""
        return self.ownership.answers_for(name)


class Member:
    """The state of one model's run, at the step of its array; it has no tensors until `bind`.

    Tensors of adapters have the width of the array's largest, padded with zeros that stay zero.
    """

    def __init__(self, config: RunConfig, groups: Groups, dtype: torch.dtype) -> None:
        self.config, self.groups, self.dtype = config, groups, dtype
        self.span = phases_of(config)[0]
        self.table: Mapping[str, Parameter] = run_parameters(config.model, config.lora)
        ownership = Ownership(groups, self.table, config.parallel.sequence_parallel, shard=False)
        self.strategy = MemberStrategy(ownership)
        self.optimizer = Optimizer({}, ownership, config.optimizer, dtype)
        self.average = WeightAverage({}, 0.0)  # an array keeps none
        self.exchange = replica_exchange(config, self.strategy, self.optimizer)
        self.loss_scale = LossScale.of(config.train)
        self.step = 0

    def bind(self, tensors: ModelTensors) -> None:
        """Takes the tensors of this model, which move where an array is compacted."""
        self.strategy.bind(tensors)
        self.optimizer.set_tensors(tensors.weights, tensors.masters, tensors.moments)

    @property
    def layout(self) -> ParallelLayout:
        return self.groups.layout

    @property
    def consumed_samples(self) -> int:
        """Sequences trained on so far."""
        return self.span.samples_before(self.step)
