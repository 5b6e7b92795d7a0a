"""Decentralized replicas, which mix weights with their neighbours' (sync/decentralized.py)."""

from collections.abc import Iterator

from mtcli.core.config.sync import SyncConfig, mixing_rule
from mtcli.core.mesh.topology import MixingGraph
from mtcli.core.plan.exchange.arithmetic import Arithmetic, passes
from mtcli.core.plan.exchange.share import ExchangeCosts, ReplicaShare

# Elementwise operations of a step beyond those of SGD with momentum.
MORE_PASSES = {"dsgd": 1, "dmsgd": 2, "awc_dmsgd": 1, "da_dmsgd": 2, "decentlam": 2}


class DecentralizedCosts(ExchangeCosts):
    """Costs of a mix per step of each parameter's weights, and for da_dmsgd of its momentum too."""

    def __init__(self, share: ReplicaShare) -> None:
        self.share, self.graph = share, MixingGraph.of(share.sync, share.replicas)
        self.rule = mixing_rule(share.sync.method, share.num_moments)
        self.mixed = (1 + (self.rule == "da_dmsgd")) * share.elements

    def sent_bytes(self) -> float:
        """See ExchangeCosts."""
        return self.graph.sent_per_replica * self.mixed * self.share.master

    def busiest_bytes(self, tree: bool) -> float:
        """See ExchangeCosts."""
        return self.graph.most_sent * self.mixed * self.share.master

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Yields the update that is sent, and the weighted sum of what is received."""
        yield passes(MORE_PASSES[self.rule], self.share.elements, len(self.share.sizes))
        yield passes(self.graph.mixing_passes, self.mixed)

    def state_bytes(self) -> float:
        """Send and receive buffers of the fullest rank, alive while the step is computed."""
        if not self.share.overlaps:
            return 0.0
        return self.graph.buffered_per_replica * self.mixed * self.share.master


def graph_facts(sync: SyncConfig, replicas: int) -> dict[str, float]:
    """The spectral gap of the mixing matrix, and the most neighbours of a replica."""
    graph = MixingGraph.of(sync, replicas)
    return {"spectral_gap": graph.spectral_gap, "neighbours": graph.most_neighbours}
