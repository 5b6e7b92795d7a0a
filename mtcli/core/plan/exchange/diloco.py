"""`local` and `diloco`: replicas that exchange outer gradients now and then (sync/diloco.py)."""

from collections.abc import Iterator, Mapping

from mtcli.core.config.sync_payload import (
    Segment,
    exchange_steps,
    fragment_of,
    segment,
    segments,
)
from mtcli.core.plan.exchange.arithmetic import Arithmetic, Kind, passes, times
from mtcli.core.plan.exchange.share import ExchangeCosts, ReplicaShare

# What compresses and decompresses values, by bits, and the largest ones.
CODED: dict[int | str, tuple[Kind, Kind]] = {
    2: ("compress_2", "decompress_2"),
    4: ("compress_4", "decompress_4"),
    8: ("compress_8", "decompress_8"),
    "top_k": ("select", "scatter"),
}


class DiLoCoCosts(ExchangeCosts):
    """Costs of outer steps, fragment by fragment.

    An exchange in full is a ring's all-reduce of master weights. Dense quantised values are
    scattered and gathered, (n-1)/n of the payload each; of the largest all replicas receive all.
    """

    def __init__(self, share: ReplicaShare) -> None:
        self.share, self.sync, self.width = share, share.sync, max(4, share.weight)
        self.fragments: list[dict[str, int]] = [{} for _ in range(self.sync.fragments)]
        for name, size in share.sizes.items():
            self.fragments[fragment_of(name, self.sync.fragments)][name] = size

    def sent_bytes(self) -> float:
        """See ExchangeCosts."""
        total = 0.0
        overlap = self.sync.overlap_steps
        starts = 0, overlap - overlap // 2  # of the phases, in steps after an exchange begins
        for fragment, sizes in enumerate(self.fragments):
            for later, sent in zip(starts, self._phases(sizes), strict=True):
                total += sent * self._exchanges(fragment, later)
        return total / self.share.steps

    def state_bytes(self) -> float:
        """Outer weights, their momentum and the error, each as wide as master weights."""
        _, momentum = self.sync.outer_rule
        return self.width * (1 + bool(momentum) + self.sync.compressed) * self.share.elements

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Yields that of each fragment's exchanges."""
        every = passes(1, self.share.elements, len(self.share.sizes))
        for fragment, sizes in enumerate(self.fragments):
            factor = self._exchanges(fragment, 0) / self.share.steps
            yield from times(factor, [every, *self._exchange(sizes)])

    def _exchanges(self, fragment: int, later: int) -> int:
        """How many of a fragment's exchanges have come so many steps further by the run's end."""
        first, every = exchange_steps(self.sync, fragment)
        return max(0, 1 + (self.share.steps - later - first) // every)

    def _phases(self, sizes: Mapping[str, int]) -> tuple[float, float]:
        """Bytes that an exchange sends at once, and of a second phase."""
        replicas, others = self.share.replicas, self.share.replicas - 1
        if not sizes:
            return 0.0, 0.0
        if self.sync.top_k:
            return others * segment(self.sync, sizes).bytes, 0.0
        if self.sync.quantise:
            payloads = [each.bytes for each in segments(self.sync, sizes, replicas)]
            return others * sum(payloads) / replicas, others * max(payloads)
        values = sum(sizes.values()) + 1  # and how many replicas are in it
        return 2 * others * values * self.width // replicas, 0.0

    def _exchange(self, sizes: Mapping[str, int]) -> Iterator[Arithmetic]:
        """Yields the arithmetic of an exchange: the pseudo-gradient, its mean, the outer step, and
        the copy of outer weights, or their mean with the replica's own."""
        sync, replicas, elements = self.sync, self.share.replicas, sum(sizes.values())
        _, momentum = sync.outer_rule
        yield passes(2 + (1 + 2 * bool(momentum) + (momentum and sync.outer_nesterov)), elements)
        yield passes(1 + bool(sync.overlap_steps), elements, len(sizes))
        if not sync.compressed or not sizes:
            yield passes(2, elements)
            return
        yield passes(2, elements)  # the error's decay, and what is added to it
        if sync.top_k:
            yield from self._coded(segment(sync, sizes), 1 + replicas)
            yield passes(2, elements)
            return
        every = segments(sync, sizes, replicas)
        for owner_segment in every:  # of a replica, and of all owners
            yield from self._coded(owner_segment, 2)
        largest = max(every, key=lambda owner_segment: sum(owner_segment.lengths))
        yield from self._coded(largest, 1 + replicas)
        # three means begin as zeros or end divided; one is added to errors
        yield passes(4, elements)

    def _coded(self, own: Segment, added: int) -> Iterator[Arithmetic]:
        """Yields that of compressing a segment, and of adding what it stands for, `added` times."""
        elements, groups = sum(own.lengths), len(own.groups)
        packs = CODED["top_k" if self.sync.top_k else self.sync.quantise]
        for kind, count in zip(packs, (1, added), strict=True):
            yield Arithmetic(kind, count * elements, count * groups)
            yield passes(count, elements, sum(map(len, own.groups)))
