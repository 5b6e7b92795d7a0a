"""Defines the protocol of strategies that reduce the gradients of one replica's ranks.

A training step calls `before_step`, then `before_last_backward` ahead of each stage's last
backward, then `after_backward`, and after the optimizer's update `after_update`. The step asks the
strategy for its gradients, their norm and clipping. `exchange.py` is for several replicas.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.ownership import OwnedShard, Ownership


class Strategy(Protocol):
    """A data-parallel strategy. Every rank makes the same calls; bodies are defaults."""

    stages: Mapping[int, nn.Module]
    ownership: Ownership
    recorded: bool
    """whether the flight recorder sees all of its collectives"""
    shards: dict[str, OwnedShard]
    """this rank's memory of every parameter, by name"""

    @property
    def gradients(self) -> dict[str, Tensor]:
        """This rank's reduced gradients, by name: [owned rows, ...]."""

    def weights(self) -> dict[str, Tensor]:
        """The owned rows of trained parameters, which this rank's optimizer updates: views."""

    def full_weights(self) -> dict[str, Tensor]:
        """All rows of this rank's shard of every parameter, by name: the strategy's own memory
        where it has them. Collective."""
        return {name: shard.tensor for name, shard in self.shards.items()}

    def gradient_buffers(self) -> list[Tensor]:
        """Lists the memory that gradients take."""

    def before_step(self, from_zero: bool = False) -> None:
        """Starts a step: its first micro-batch's gradients overwrite the last step's.

        With `from_zero` they are added to zeroed buffers, so that all micro-batches cost the same.
        """
        return

    def before_last_backward(self, stage: int) -> None:
        """Notes that the next backward of a stage is its last one of the step."""
        return

    def after_backward(self) -> None:
        """Waits until every gradient is reduced; those that no backward touched are zero."""
        return

    def when_reduced(self, on_reduced: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Registers `on_reduced`, called with each bucket's reduced gradients while backward runs.

        The order is the same on every rank. Buckets that are reduced after the backward are not
        reported; by default none is.
        """
        return

    def gradient_buckets(self) -> list[list[str]]:
        """Names of parameters whose gradients are reduced together; all of them by default."""
        return [list(self.weights())]

    def after_update(self) -> None:
        """All-gathers the updated rows, where ranks own rows of replicated parameters.

        Forwards may overlap it. Whoever reads weights apart from the stages' forwards calls
        `settle` first.
        """
        return

    def settle(self) -> None:
        """Waits until the weights are those of the last update."""
        return

    def counted_gradients(self) -> list[Tensor]:
        """The gradients that this rank counts in the global norm: each element on one rank."""
        answers_for = self.ownership.answers_for
        return [x for name, x in self.gradients.items() if x.numel() and answers_for(name)]

    def scale_gradients_(self, factor: float) -> None:
        """Multiplies every reduced gradient in place, as clipping does."""
        for gradient in self.gradients.values():
            gradient.mul_(factor)

    def saves(self, name: str) -> bool:
        """Whether this rank writes its shard of a parameter into a checkpoint."""


def is_block(name: str) -> bool:
    """Whether a module of a stage, by its name there, is one of its blocks."""
    return name.startswith("blocks.") and name.count(".") == 1


def sum_tied_gradients_(gradients: Mapping[str, Tensor], ownership: Ownership) -> None:
    """Sums the gradients of a tied embedding's two copies, at the ends of the pipeline."""
    if ownership.tied is not None and ownership.tied in gradients:
        all_reduce(gradients[ownership.tied], ownership.groups.axes["ends"])
