"""The facts of decentralized replicas, which mix their weights with neighbours'
(sync/decentralized.py)."""

from collections.abc import Iterator

from mtcli.core.config.sync import Method, mixing_rule
from mtcli.core.exchange.arithmetic import Arithmetic, passes
from mtcli.core.exchange.facts import ExchangeFacts, ReplicaShare
from mtcli.core.exchange.topology import MixingGraph

# Elementwise operations of a step beyond those of SGD with momentum.
MORE_PASSES: dict[Method, int] = {
    "dsgd": 1, "dmsgd": 2, "awc_dmsgd": 1, "da_dmsgd": 2, "decentlam": 2,
}  # fmt: skip


class MixingFacts(ExchangeFacts):
    """One mix per step of each parameter's weights, and for da_dmsgd of its momentum too."""

    on_graph = True

    def __init__(self, share: ReplicaShare) -> None:
        super().__init__(share)
        self.mixing_graph = MixingGraph.of(share.sync, share.replicas)
        self.method = mixing_rule(share.sync.method, share.optimizer.momentum)
        self.copies = 1 + (self.method == "da_dmsgd")  # of the parameters' size that are mixed
        self.starts_with_step = self.method == "awc_dmsgd"
        self.mixed = self.copies * share.elements

    def sent_bytes(self) -> float:
        """See ExchangeFacts."""
        return self.mixing_graph.sent_per_replica * self.mixed * self.share.master

    def busiest_bytes(self, tree: bool) -> float:
        """See ExchangeFacts."""
        return self.mixing_graph.most_sent * self.mixed * self.share.master

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Yields the computation of the tensors to send, and the weighted sum of the received
        ones."""
        yield passes(MORE_PASSES[self.method], self.share.elements, len(self.share.sizes))
        yield passes(self.mixing_graph.mixing_passes, self.mixed)

    def state_bytes(self) -> float:
        """Bytes of send and receive buffers on the fullest rank, where they are alive throughout a
        step."""
        if not self.share.overlaps:
            return 0.0
        return self.mixing_graph.buffered_per_replica * self.mixed * self.share.master

    def graph(self) -> dict[str, float]:
        """The spectral gap of the mixing matrix, and the most neighbours of a replica."""
        graph = self.mixing_graph
        return {"spectral_gap": graph.spectral_gap, "neighbours": graph.most_neighbours}
