"""Defines what replicas of the model exchange, and when: the methods of [sync].

A replica reduces its own gradients by a Strategy, whatever its layout inside. A ReplicaExchange
then makes the step's update. With method = "all_reduce" there is one replica and nothing is
exchanged; every other method is a subclass in a file of its own. Ranks that hold the same shards
in different replicas exchange them along the axis `replicas`; every rank makes the same calls.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis
from mtcli.core.sync.sketch import sketch
from mtcli.core.sync.strategy import Strategy


class ReplicaExchange:
    """The update of a run with one replica; the base of those with several."""

    def __init__(self, inside: Strategy, optimizer: Optimizer) -> None:
        self.inside, self.optimizer = inside, optimizer

    @property
    def replicas(self) -> Axis:
        """The ranks that hold the same shards in other replicas."""
        return self.inside.ownership.groups.replicas

    @property
    def weights_differ(self) -> bool:
        """Whether replicas have other weights, and other optimizer state, than each other."""
        return self.replicas.size > 1

    @property
    def _measured_axis(self) -> Axis:
        """The replicas axis under another name, so that measuring does not count as the method's
        traffic."""
        return self.replicas._replace(name="replicas_measured")

    def before_step(self, lr: float) -> None:
        """Starts a step, before its first forward, whose update is to be at a learning rate."""

    def after_backward(self) -> None:
        """Exchanges gradients, where the method does, once this replica's are reduced."""

    def note_loss(self, loss: float) -> None:
        """Notes this replica's mean loss of a step, before its update."""

    def update(self, lr: float, factor: float) -> None:
        """Updates the weights by this replica's gradients times a factor, which clips them."""
        self.optimize(lr, factor)
        self.after_step()
        self.inside.after_update()

    def optimize(self, lr: float, factor: float) -> None:
        """Updates the rows that this rank owns."""
        if factor != 1.0 and not self.optimizer.by_kernels:
            self.inside.scale_gradients_(factor)
            factor = 1.0
        self.optimizer.step(self.inside.gradients, lr, factor)

    def after_step(self) -> None:
        """Exchanges master weights, once this replica's optimizer has updated them."""

    def meet(self, steps: int) -> None:
        """Exchanges what is due when asynchronous replicas have made so many steps on average."""

    def state(self) -> dict[str, Tensor]:
        """State for a checkpoint: owned rows of tensors, named `<kind>/<parameter>`."""
        return {}

    def differs(self, kind: str) -> bool:
        """Whether replicas have other state of a kind, the optimizer's or the exchange's."""
        return self.weights_differ

    def rows_here(self, kind: str, name: str) -> slice | None:
        """The stored rows of a kind of state that replicas share out; None where each has all."""
        return None

    def counters(self) -> dict[str, Any]:
        """State for a checkpoint that is no tensor, as JSON; the same on every rank."""
        return {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Restores `counters`, once weights and state are restored."""

    def begin(self) -> None:
        """Starts from the weights, which are those of a seed, of another model, or of the average
        of another number of replicas."""

    def rejoin(self, counters: Mapping[str, Any]) -> str:
        """Starts from a checkpoint with another number of replicas, whose weights and state have
        been averaged, and whose counters are given; returns what the run starts from, in words for
        the user, where that is not this average."""
        self.begin()
        self.load_counters({})
        return ""

    def buffers(self) -> list[Tensor]:
        """Lists the memory that the exchange takes besides the optimizer's."""
        return list(self.state().values())

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives every replica the average of all replicas' weights for a while."""
        if not self.weights_differ:
            yield
            return
        own = {name: shard.tensor.clone() for name, shard in self.inside.shards.items()}
        self._average()
        try:
            yield
        finally:
            for name, shard in self.inside.shards.items():
                shard.tensor.copy_(own[name])

    @torch.no_grad()
    def distance(self) -> float | None:
        """The root of the replicas' mean squared distance from their average; None where they are
        equal.

        Known to about 1 % from sketches of 8,191 numbers, which is all that is sent for it.
        """
        if not self.weights_differ:
            return None
        ownership = self.inside.ownership
        weights = self.inside.weights()
        counted = [x for name, x in weights.items() if x.numel() and ownership.answers_for(name)]
        own = sketch(counted, ownership.groups.device)
        mean = all_reduce(own.clone(), self._measured_axis) / self.replicas.size
        squares = (own - mean).square().sum().view(1)
        total = all_reduce(squares, ownership.groups.world)
        return float(total / self.replicas.size) ** 0.5

    @torch.no_grad()
    def _average(self) -> None:
        axis = self._measured_axis
        for shard in self.inside.shards.values():
            wide = shard.tensor.to(torch.promote_types(shard.tensor.dtype, torch.float32))
            mean = all_reduce(wide.clone(), axis) / axis.size
            shard.tensor.copy_(mean)
