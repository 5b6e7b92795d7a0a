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

from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.flat import unflatten


class PeriodicPulls(ReplicaExchange):
    """The exchange of workers that are pulled; a method says where to."""

    @property
    def masters(self) -> list[Tensor]:
        """The master weights of the rows that this rank owns."""
        return list(self.optimizer.masters.values())

    @abstractmethod
    def pull(self, steps: int) -> None:
        """Moves the master weights, as is due after so many steps. Collective."""

    def after_step(self) -> None:
        """Makes the exchange that is due, unless workers only meet at the end of a round."""
        if not self.facts.share.sync.asynchronous:
            self._exchange(self.optimizer.updates)

    def meet(self, steps: int) -> None:
        """Makes the exchange that is due when workers have made so many steps on average."""
        self._exchange(steps)
        self.inside.after_update()

    @torch.no_grad()
    def _exchange(self, steps: int) -> None:
        if any(turns.is_due(steps) for turns in self.facts.turns):
            self.pull(steps)
            self.optimizer.round_()


def move_(tensors: Sequence[Tensor], towards: Tensor, share: float) -> None:
    """x = x + share (towards - x), in place; `towards` has all tensors one after the other.

    Exact where x is there already, and at a share of 1.
    """
    targets = unflatten(towards, [x.shape for x in tensors])
    for x, target in zip(tensors, targets, strict=True):
        x.lerp_(target, share)
