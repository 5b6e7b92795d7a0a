"""EASGD: workers and a centre pull each other (arXiv:1412.6651, Algorithm 1, synchronous form).

Every `period` steps, with a = pull, worker i sets x_i = x_i - a (x_i - c) and the centre becomes
c = c + a sum_i (x_i - c), both from the old values. The centre starts at the initial weights. Each
worker has a copy of it, updated from an all-reduce of the weights, so there is no server.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtcli.core.exchange.easgd import EasgdFacts
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.sync.flat import flatten
from mtcli.core.sync.pulls import PeriodicPulls, move_
from mtcli.core.sync.strategy import Strategy


class ElasticPulls(PeriodicPulls):
    """The exchange of EASGD."""

    def __init__(self, inside: Strategy, optimizer: Optimizer, facts: EasgdFacts) -> None:
        super().__init__(inside, optimizer, facts)
        self.centre = {name: torch.empty_like(x) for name, x in optimizer.masters.items()}

    def pull(self, steps: int) -> None:
        """Moves the master weights and the centre towards each other."""
        pull = self.facts.share.sync.pull
        if not pull or not self.masters:
            return
        centre = list(self.centre.values())
        previous_centre = flatten(centre)
        mean = all_reduce(flatten(self.masters), self.replicas) / self.replicas.size
        move_(self.masters, previous_centre, pull)
        move_(centre, mean, pull * self.replicas.size)

    def begin(self) -> None:
        """Sets the centre to the present weights."""
        for name, master in self.optimizer.masters.items():
            self.centre[name].copy_(master)

    def tensors(self, kind: str) -> Mapping[str, Tensor]:
        return self.centre

    def counters(self) -> dict[str, Any]:
        """A mark that the checkpoint has a centre."""
        return {"centre": True}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Sets the centre to the weights, if the checkpoint's run had no centre."""
        if not counters.get("centre"):
            self.begin()
