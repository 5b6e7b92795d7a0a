"""Pulls replicas towards others every few steps: what LSGD and EASGD have in common.

Between two exchanges each replica, a worker in the papers' words, trains by SGD on its own part of
the data. An exchange reads and moves master weights, of the rows that a rank owns; momenta are each
worker's own. Asynchronous workers meet when their steps are `period` each on average
(`training/rounds.py`), so that a faster one makes more of them.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mtcli.core.exchange.easgd import EasgdFacts
from mtcli.core.exchange.lsgd import LsgdFacts
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.flat import flatten, unflatten
from mtcli.core.sync.strategy import Strategy


class PeriodicPulls(ReplicaExchange):
    """The exchange of workers that are pulled; a method says where to."""

    def __init__(
        self, inside: Strategy, optimizer: Optimizer, facts: LsgdFacts | EasgdFacts
    ) -> None:
        super().__init__(inside, optimizer, facts)
        self.sync = facts.share.sync

    @property
    def masters(self) -> list[Tensor]:
        """The master weights of the rows that this rank owns."""
        return list(self.optimizer.masters.values())

    @abstractmethod
    def pull(self, steps: int) -> None:
        """Moves the master weights, as is due after so many steps. Collective."""

    def is_due(self, steps: int) -> bool:
        """Whether there is an exchange after so many steps."""
        return any(turns.is_due(steps) for turns in self.turns)

    def after_step(self) -> None:
        """Makes the exchange that is due, unless workers only meet at the end of a round."""
        if not self.sync.asynchronous:
            self._exchange(self.optimizer.updates)

    def meet(self, steps: int) -> None:
        """Makes the exchange that is due when workers have made so many steps on average."""
        self._exchange(steps)
        self.inside.after_update()

    @torch.no_grad()
    def _exchange(self, steps: int) -> None:
        if self.is_due(steps):
            self.pull(steps)
            self.optimizer.tensors.round_()

    def flat_masters(self) -> Tensor:
        """A copy of the master weights, one after the other."""
        return flatten(self.masters)


def move_(tensors: Sequence[Tensor], towards: Tensor, share: float) -> None:
    """x = x + share (towards - x), in place; `towards` has all tensors one after the other.

    Exact where x is there already, and at a share of 1.
    """
    targets = unflatten(towards, [x.shape for x in tensors])
    for x, target in zip(tensors, targets, strict=True):
        x.lerp_(target, share)
