"""The facts of `local` and `diloco`: outer steps every `period` updates (sync/diloco.py)."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mtcli.core.exchange.arithmetic import Arithmetic, Kind, passes, times
from mtcli.core.exchange.facts import ExchangeFacts, ReplicaShare, StateKind, Turns
from mtcli.core.exchange.payload import Segment, segment, segments

# What compresses and decompresses values, by bits, and the largest ones.
CODED: dict[int | str, tuple[Kind, Kind]] = {
    2: ("compress_2", "decompress_2"), 4: ("compress_4", "decompress_4"),
    8: ("compress_8", "decompress_8"), "top_k": ("select", "scatter"),
}  # fmt: skip
OUTER, MOMENTUM, ERROR = "outer", "outer_momentum", "error"


class FragmentFacts(NamedTuple):
    """A fragment's parameters with their elements, and the updates after which it is exchanged."""

    sizes: Mapping[str, int]
    turns: Turns


class DiLoCoFacts(ExchangeFacts):
    """Outer steps, fragment by fragment.

    Uncompressed, an exchange is a ring's all-reduce of pseudo-gradients. Quantised dense values are
    reduce-scattered and all-gathered, (n-1)/n of the payload each. The largest values are
    all-gathered.
    """

    def __init__(self, share: ReplicaShare) -> None:
        super().__init__(share)
        self.sync = sync = share.sync
        self.lr, self.momentum = sync.outer_rule
        errors = (StateKind(ERROR, differs=True),) if sync.compressed else ()
        self.kept = (StateKind(OUTER), *(StateKind(MOMENTUM),) * bool(self.momentum), *errors)
        sizes: list[dict[str, int]] = [{} for _ in range(sync.fragments)]
        for name, size in share.sizes.items():
            sizes[fragment_of(name, sync.fragments)][name] = size
        period = sync.steps_between
        firsts = [period * (i + 1) // sync.fragments for i in range(sync.fragments)]
        turns = (Turns(first, period) for first in firsts)
        self.fragments = [FragmentFacts(*pair) for pair in zip(sizes, turns, strict=True)]
        self.second_phase = sync.overlap_steps // 2  # updates for it, up to when all is applied

    def segments(self, sizes: Mapping[str, int]) -> list[Segment]:
        """The segments of a fragment: one per owner (quantised), one in all (top_k), none
        uncompressed."""
        if self.sync.top_k:
            return [segment(self.sync, sizes)]
        return segments(self.sync, sizes, self.share.replicas) if self.sync.quantise else []

    def sent_bytes(self) -> float:
        """See ExchangeFacts."""
        total = 0.0
        starts = 0, self.sync.overlap_steps - self.second_phase  # of the phases, after a turn
        for sizes, turns in self.fragments:
            for later, sent in zip(starts, self._phases(sizes), strict=True):
                total += sent * turns.count(self.share.steps - later)
        return total / self.share.steps

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Yields the arithmetic of each fragment's exchanges."""
        present = passes(1, self.share.elements, len(self.share.sizes))
        for sizes, turns in self.fragments:
            factor = turns.count(self.share.steps) / self.share.steps
            yield from times(factor, [present, *self._exchange(sizes)])

    def _phases(self, sizes: Mapping[str, int]) -> tuple[float, float]:
        """(bytes sent in an exchange's first phase, bytes sent in its second)."""
        replicas, peers = self.share.replicas, self.share.replicas - 1
        if not sizes:
            return 0.0, 0.0
        payloads = [part.bytes for part in self.segments(sizes)]
        if self.sync.top_k:
            return peers * payloads[0], 0.0
        if self.sync.quantise:
            return peers * sum(payloads) / replicas, peers * max(payloads)
        values = sum(sizes.values()) + 1  # and how many replicas are in it
        return 2 * peers * values * self.share.master // replicas, 0.0

    def _exchange(self, sizes: Mapping[str, int]) -> Iterator[Arithmetic]:
        """Yields the arithmetic of one exchange: pseudo-gradient, mean, outer step, and the copy of
        the outer weights or their mean with the replica's own."""
        sync, replicas, elements = self.sync, self.share.replicas, sum(sizes.values())
        momentum = self.momentum
        yield passes(2 + (1 + 2 * bool(momentum) + (momentum and sync.outer_nesterov)), elements)
        yield passes(1 + bool(sync.overlap_steps), elements, len(sizes))
        yield passes(2, elements)  # the mean; or the error's decay, and what is added to it
        if not sync.compressed or not sizes:
            return
        parts = self.segments(sizes)
        if sync.top_k:
            yield from self._coded(parts[0], 1 + replicas)
            yield passes(2, elements)
            return
        for part in parts:  # of a replica, and of all owners
            yield from self._coded(part, 2)
        yield from self._coded(max(parts, key=lambda part: sum(part.lengths)), 1 + replicas)
        # three means begin as zeros or end divided; one is added to errors
        yield passes(4, elements)

    def _coded(self, part: Segment, added: int) -> Iterator[Arithmetic]:
        """Yields the arithmetic of compressing a segment once and adding `added` payloads of it."""
        elements, groups = sum(part.lengths), len(part.groups)
        packs = CODED["top_k" if self.sync.top_k else self.sync.quantise]
        for kind, count in zip(packs, (1, added), strict=True):
            yield Arithmetic(kind, count * elements, count * groups)
            yield passes(count, elements, sum(map(len, part.groups)))


def fragment_of(name: str, fragments: int) -> int:
    """The fragment of a parameter: layer i in fragment i mod `fragments`, embeddings in the first,
    the final norm and head in the last."""
    if match := re.match(r"blocks\.(\d+)\.", name):
        return int(match[1]) % fragments
    return fragments - 1 if name.startswith(("final_norm", "head")) else 0
