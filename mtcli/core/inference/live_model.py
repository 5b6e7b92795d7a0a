"""Opens the model of a run that trains for forward passes between its steps.

Its stages are built once more, for sequences of any length, and have the run's own tensors as their
weights while passes are made. The ranks of cp are data ranks here. Nothing of the run is changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from mtcli.core.checkpoint.fine_tuning import starting_folder
from mtcli.core.config.schema import BatchConfig, RunConfig
from mtcli.core.inference.model import InferenceModel, end_ids
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.model.build import build_stages
from mtcli.core.parallel.groups import Groups, make_groups
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.replica_average import averaged
from mtcli.core.sync.strategy import Strategy


class Trained(Protocol):
    """A run that trains, as the owner of the weights that an evaluation reads."""

    config: RunConfig
    groups: Groups
    exchange: ReplicaExchange

    @property
    def strategy(self) -> Strategy:
        """The strategy that holds the weights."""


class LiveModel:
    """The model of a run, which has weights only inside `weights`."""

    def __init__(self, trained: Trained) -> None:
        """Builds the stages, without memory. Collective."""
        groups, self.trained = trained.groups, trained
        config = _of_forward_passes(trained.config, groups.layout.world)
        layout = ParallelLayout.of(config.parallel, groups.layout.world)
        if layout != groups.layout:
            recorder = groups.world.recorder
            groups = make_groups(layout, groups.rank, groups.device, groups.timeout, recorder)
        self.groups, self.stages = groups, build_stages(config, groups)
        self.parameters = [p for stage in self.stages.values() for p in stage.named_parameters()]
        for _, parameter in self.parameters:
            parameter.requires_grad_(False)
        self._clear()

    @property
    def model(self) -> InferenceModel:
        """The model as the run has it now: a phase may change its positions."""
        config = _of_forward_passes(self.trained.config, self.groups.layout.world)
        return InferenceModel(config, self.groups, self.stages)

    @contextmanager
    def weights(self) -> Iterator[InferenceModel]:
        """Inside, the model has the run's weights, or the average of replicas that differ.
        Collective.

        Takes no memory for weights but where ranks shard them (zero = 3): there each rank has all
        rows of its tp and pp shard.
        """
        self.trained.strategy.settle()
        with averaged(self.trained.exchange):
            tensors = self.trained.strategy.full_weights()
            for name, parameter in self.parameters:
                parameter.data = tensors[name].to(parameter.dtype)
            del tensors
            try:
                yield self.model
            finally:
                self._clear()

    def stated_ends(self) -> frozenset[int] | None:
        """Reads the tokens that end a text, which the run's checkpoints have from the folder that
        it started from; None without any."""
        start = starting_folder(self.trained.config)
        return end_ids(start) if start else None

    def _clear(self) -> None:
        for _, parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)


def _of_forward_passes(config: RunConfig, world: int) -> RunConfig:
    """Returns the config of passes over whole sequences on a run's ranks, with the same shards."""
    update = {"sequence_parallel": False, "cp": 1, "zero": 0, "recompute": "none"}
    batch = BatchConfig(seq_len=config.model.max_seq_len, global_batch_size=world)
    parallel = config.parallel.model_copy(update=update)
    return config.model_copy(update={"parallel": parallel, "batch": batch})
