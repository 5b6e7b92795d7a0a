"""The facts of `easgd`: workers and a centre that pull each other (sync/easgd.py)."""

from collections.abc import Iterator

from mtcli.core.exchange.arithmetic import Arithmetic, passes
from mtcli.core.exchange.facts import ExchangeFacts, ReplicaShare, StateKind, Turns


class EasgdFacts(ExchangeFacts):
    """An all-reduce of master weights in each exchange."""

    kept = (StateKind("centre"),)

    def __init__(self, share: ReplicaShare) -> None:
        super().__init__(share)
        period = share.sync.steps_between
        self.turns = (Turns(period, period),)
        exchanges = self.turns[0].count(share.steps) if share.sync.pull else 0
        self.times = exchanges / share.steps

    def sent_bytes(self) -> float:
        """See ExchangeFacts."""
        return self.times * self.share.both_ways * (self.share.elements * self.share.master)

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Yields the copies of weights and centre, the mean, and both pulls."""
        yield passes(3 * self.times, self.share.elements)
        yield passes(2 * self.times, self.share.elements, len(self.share.sizes))
