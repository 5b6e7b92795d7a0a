"""LSGD: workers are pulled to the leader of their group and to that of all (arXiv:1905.10395).

A leader is the worker with the least mean training loss over its last `period` steps, the first of
equal ones. Every `period` steps x = x - pull (x - leader of the group); then, every `global_period`
steps, x = x - global_pull (x - leader of all) (Algorithm 1; neither is times the learning rate).
The leader of all leads its group too, so neither pull moves it, and a stationary point of its loss
is a stationary point of the method.

Each worker sends three numbers to all; then the leaders alone send weights.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch

from mtcli.core.config.errors import wrong
from mtcli.core.exchange.lsgd import MESSAGE, LsgdFacts
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.collectives import all_gather, broadcast, gather_values
from mtcli.core.parallel.groups import Axis, consecutive
from mtcli.core.sync.flat import flatten
from mtcli.core.sync.pulls import PeriodicPulls, move_
from mtcli.core.sync.strategy import Strategy

NEVER = float("inf")  # the loss of a worker that has made no step


class LeaderPulls(PeriodicPulls):
    """The exchange of LSGD. Workers of a group are `group_size` consecutive replicas."""

    def __init__(self, inside: Strategy, optimizer: Optimizer, facts: LsgdFacts) -> None:
        super().__init__(inside, optimizer, facts)
        timeout = inside.ownership.groups.timeout
        self.pulls = [
            (consecutive(self.replicas, pull.workers, pull.axis, timeout), pull)
            for pull in facts.pulls
        ]
        self.losses: deque[float] = deque(maxlen=facts.share.sync.steps_between)

    def note_loss(self, loss: float) -> None:
        """Notes this worker's loss of a step."""
        self.losses.append(loss)

    def pull(self, steps: int) -> None:
        """Elects leaders and moves the master weights towards theirs."""
        losses = self._gathered_losses(steps)
        for axis, pull in self.pulls:
            first = self.replicas.rank - axis.rank
            if pull.turns.is_due(steps):
                leader = elected(losses[first : first + axis.size])
                self._pull_to(axis, leader, pull.strength)

    def counters(self) -> dict[str, Any]:
        """The last losses of each worker, by whose average leaders are elected."""
        return {"losses": gather_values(list(self.losses), self.measured_axis)}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Restores this worker's losses, where its run had as many workers.

        Raises MtcliError where they are not lists of finite numbers.
        """
        all_losses = counters.get("losses", [])
        if not isinstance(all_losses, list) or not all(map(_are_losses, all_losses)):
            message = f"the checkpoint's losses of workers are {str(all_losses)[:60]}"
            raise wrong(
                message, "another checkpoint of the run; each worker's are a list of numbers"
            )
        self.losses.clear()
        if len(all_losses) == self.replicas.size:
            self.losses.extend(all_losses[self.replicas.rank])

    def _gathered_losses(self, steps: int) -> list[float]:
        """The mean loss of every worker, from an all-gather of (worker, steps, loss)."""
        mean = sum(self.losses) / len(self.losses) if self.losses else NEVER
        device = self.inside.ownership.groups.device
        numbers = {"worker": self.replicas.rank, "steps": steps, "loss": mean}
        message = torch.tensor([[numbers[name] for name in MESSAGE]], dtype=torch.float64)
        rows = all_gather(message.to(device), self.replicas).tolist()
        assert [row[:2] for row in rows] == [[i, steps] for i in range(len(rows))], rows
        return [loss for _, _, loss in rows]

    def _pull_to(self, axis: Axis, leader: int, share: float) -> None:
        """Moves the master weights by `share` towards the leader's, which are broadcast."""
        if axis.size == 1 or not share or not self.masters:
            return
        move_(self.masters, broadcast(flatten(self.masters), axis, leader), share)


def _are_losses(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is float and isfinite(x) for x in value)


def elected(losses: Sequence[float]) -> int:
    """The first worker with the least loss."""
    return min(range(len(losses)), key=losses.__getitem__)
