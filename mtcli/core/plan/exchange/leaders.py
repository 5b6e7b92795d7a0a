"""Workers that are pulled to leaders (LSGD) or to a centre (EASGD), now and then."""

from collections.abc import Iterator
from math import ceil, lcm, log2

from mtcli.core.plan.exchange.arithmetic import Arithmetic, passes
from mtcli.core.plan.exchange.share import ExchangeCosts, ReplicaShare

MESSAGE_BYTES = 3 * 8  # of a worker to all others: its number, steps and loss


class LsgdCosts(ExchangeCosts):
    """Costs of LSGD: messages of all workers, then broadcasts of leaders' master weights.

    In a ring, n ranks send a broadcast n - 1 times.
    """

    def __init__(self, share: ReplicaShare) -> None:
        self.share = share
        self.bytes = share.elements * share.master

    def sent_bytes(self) -> float:
        """See ExchangeCosts."""
        sync, steps, replicas = self.share.sync, self.share.steps, self.share.replicas
        period, global_period = sync.steps_between, sync.steps_between_global
        events = steps // period + steps // global_period - steps // lcm(period, global_period)
        messages = events * (replicas - 1) * MESSAGE_BYTES / steps
        return messages + sum(
            times * (ranks - 1) / ranks * self.bytes for times, ranks in self._pulls()
        )

    def busiest_bytes(self, tree: bool) -> float:
        """Bytes of the busiest leader: one copy to the next in a ring, ceil(log2 n) in a tree."""
        return self.bytes * sum(
            times * (ceil(log2(ranks)) if tree else 1) for times, ranks in self._pulls()
        )

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Yields copies of weights, and their pull to the leader's."""
        for times, _ in self._pulls():
            yield passes(times, self.share.elements)
            yield passes(times, self.share.elements, len(self.share.sizes))

    def _pulls(self) -> Iterator[tuple[float, int]]:
        """Yields (mean pulls per step, ranks among which a leader sends) in groups, and of all."""
        sync, replicas = self.share.sync, self.share.replicas
        for period, pull, ranks in (
            (sync.steps_between, sync.pull, sync.workers_of_group(replicas)),
            (sync.steps_between_global, sync.global_pull, replicas),
        ):
            if pull > 0.0 and ranks > 1:
                yield self.share.steps // period / self.share.steps, ranks


class EasgdCosts(ExchangeCosts):
    """Costs of EASGD: an all-reduce of master weights in each exchange."""

    def __init__(self, share: ReplicaShare) -> None:
        self.share = share
        exchanges = share.steps // share.sync.steps_between if share.sync.pull else 0
        self.times = exchanges / share.steps
        self.bytes = share.elements * share.master

    def sent_bytes(self) -> float:
        """See ExchangeCosts."""
        return self.times * self.share.both_ways * self.bytes

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Yields copies of weights and centre, the mean, and both pulls."""
        yield passes(3 * self.times, self.share.elements)
        yield passes(2 * self.times, self.share.elements, len(self.share.sizes))

    def state_bytes(self) -> float:
        """Bytes of the centre's copy of the weights."""
        return float(self.bytes)
