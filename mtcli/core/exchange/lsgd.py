"""The facts of `lsgd`: workers are pulled to their group's leader and to the leader of all
(sync/lsgd.py)."""

from collections.abc import Iterator
from math import ceil, lcm, log2
from typing import NamedTuple

from mtcli.core.exchange.arithmetic import Arithmetic, passes
from mtcli.core.exchange.facts import ExchangeFacts, ReplicaShare, Turns

MESSAGE = "worker", "steps", "loss"  # float64s that each worker sends to all


class LeaderPull(NamedTuple):
    """The pull of `workers` consecutive workers to the leader among them, along `axis`."""

    axis: str
    turns: Turns
    strength: float
    workers: int


class LsgdFacts(ExchangeFacts):
    """All workers' messages, then broadcasts of the leaders' master weights.

    In a ring of n ranks, n - 1 ranks send a broadcast's tensor on.
    """

    def __init__(self, share: ReplicaShare) -> None:
        super().__init__(share)
        sync, replicas = share.sync, share.replicas
        periods = sync.steps_between, sync.steps_between_global
        self.turns = tuple(Turns(period, period) for period in periods)
        group = sync.workers_of_group(replicas)
        self.pulls = (
            LeaderPull("replica_group", self.turns[0], sync.pull, group),
            LeaderPull("replicas", self.turns[1], sync.global_pull, replicas),
        )
        self.bytes = share.elements * share.master

    def sent_bytes(self) -> float:
        """See ExchangeFacts."""
        steps = self.share.steps
        both = steps // lcm(*(turns.every for turns in self.turns))
        events = sum(turns.count(steps) for turns in self.turns) - both
        messages = events * (self.share.replicas - 1) * 8 * len(MESSAGE) / steps
        return messages + sum(
            times * (workers - 1) / workers * self.bytes for times, workers in self._broadcasts()
        )

    def busiest_bytes(self, tree: bool) -> float:
        """Bytes that the busiest leader sends: 1 copy in a ring, ceil(log2 n) in a tree."""
        return self.bytes * sum(
            times * (ceil(log2(workers)) if tree else 1) for times, workers in self._broadcasts()
        )

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Yields the copies of weights, and their pull to the leader's."""
        for times, _ in self._broadcasts():
            yield passes(times, self.share.elements)
            yield passes(times, self.share.elements, len(self.share.sizes))

    def _broadcasts(self) -> Iterator[tuple[float, int]]:
        """Yields (mean pulls per step, workers of a broadcast) of each kind of pull."""
        for _, turns, strength, workers in self.pulls:
            if strength and workers > 1:
                yield turns.count(self.share.steps) / self.share.steps, workers
