"""Pulls replicas towards a leader or a centre every few steps: the base of LSGD and EASGD.

Between two exchanges each replica (the papers' worker) trains by SGD on its own part of the data.
An exchange reads and moves the master weights of a rank's owned rows; momenta stay each worker's
own. Asynchronous workers exchange once they have made `period` steps on average
(`training/rounds.py`), so that faster workers make more steps.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.flat import unflatten


class PeriodicPulls(ReplicaExchange):
    """The exchange of workers that are pulled; a subclass defines `pull`."""

    @property
    def masters(self) -> list[Tensor]:
        """The master weights of the rows that this rank owns."""
        return list(self.optimizer.masters.values())

    @abstractmethod
    def pull(self, steps: int) -> None:
        """Moves the master weights by the pulls that are due after `steps` steps. Collective."""

    def after_step(self) -> None:
        """Makes the exchange that is due; asynchronous workers make theirs in `meet`."""
        if not self.facts.share.sync.asynchronous:
            self._exchange(self.optimizer.updates)

    def meet(self, steps: int) -> None:
        """Makes the exchange that is due at a mean of `steps` steps per worker."""
        self._exchange(steps)
        self.inside.after_update()

    @torch.no_grad()
    def _exchange(self, steps: int) -> None:
        if any(turns.is_due(steps) for turns in self.facts.turns):
            self.pull(steps)
            self.optimizer.round_()


def move_(tensors: Sequence[Tensor], towards: Tensor, share: float) -> None:
    """x = x + share (towards - x), in place; `towards` is the tensors' target as one flat tensor.

    Exact where x equals its target, and at a share of 1.
    """
    targets = unflatten(towards, [x.shape for x in tensors])
    for x, target in zip(tensors, targets, strict=True):
        x.lerp_(target, share)
