"""Counts what `local` and `diloco` send, keep and compute, without torch."""

from collections.abc import Iterator, Mapping

from mtcli.core.config.sync import SyncConfig
from mtcli.core.config.sync_payload import (
    Segment,
    exchange_steps,
    fragment_of,
    segment,
    segments,
)
from mtcli.core.plan.arithmetic import Arithmetic, passes, times
from mtcli.core.plan.calibration import Kind

# What compresses and decompresses values, by bits, and the largest ones.
CODED: dict[int | str, tuple[Kind, Kind]] = {
    2: ("compress_2", "decompress_2"),
    4: ("compress_4", "decompress_4"),
    8: ("compress_8", "decompress_8"),
    "top_k": ("select", "scatter"),
}


def diloco_bytes(
    sync: SyncConfig, steps: int, replicas: int, sizes: Mapping[str, int], width: int
) -> float:
    """Mean bytes per step of a run that a rank sends along `replicas`, of the replicas' mean.

    It owns so many elements of each parameter, of `width` bytes, and an exchange in full is a
    ring's all-reduce of master weights, 2 (n-1)/n of them. Dense quantised values are scattered
    and gathered, (n-1)/n of the payload each; of the largest all replicas receive all.
    """
    total = 0.0
    second = sync.overlap_steps - sync.overlap_steps // 2  # steps after which the gather starts
    for fragment, own in enumerate(_fragments(sync, sizes)):
        first, every = exchange_steps(sync, fragment)
        for later, sent in zip((0, second), _phases(sync, replicas, own, width), strict=True):
            total += sent * max(0, 1 + (steps - later - first) // every)
    return total / steps


def diloco_arithmetic(
    sync: SyncConfig, steps: int, replicas: int, sizes: Mapping[str, int]
) -> Iterator[Arithmetic]:
    """Yields the mean arithmetic per step of a run on a rank that owns so many elements of each
    parameter."""
    for fragment, own in enumerate(_fragments(sync, sizes)):
        first, every = exchange_steps(sync, fragment)
        exchanges = max(0, 1 + (steps - first) // every)
        found = [passes(1, sum(sizes.values()), len(sizes)), *_exchange(sync, replicas, own)]
        yield from times(exchanges / steps, found)


def _exchange(sync: SyncConfig, replicas: int, sizes: Mapping[str, int]) -> Iterator[Arithmetic]:
    """Yields the arithmetic of an exchange: the pseudo-gradient, its mean, the outer step, and the
    copy of outer weights, or their mean with the replica's own."""
    elements = sum(sizes.values())
    _, momentum = sync.outer_rule
    yield passes(2 + (1 + 2 * bool(momentum) + (momentum and sync.outer_nesterov)), elements)
    yield passes(1 + bool(sync.overlap_steps), elements, len(sizes))
    if not sync.compressed or not sizes:
        yield passes(2, elements)
        return
    yield passes(2, elements)  # the error's decay, and what is added to it
    if sync.top_k:
        own = segment(sync, sizes)
        yield from _coded(sync, own, 1, 1 + replicas)
        yield passes(2, elements)
        return
    every = segments(sync, sizes, replicas)
    for one in every:  # of a replica, and of all owners
        yield from _coded(sync, one, 1, 2)
    largest = max(every, key=lambda one: sum(one.lengths))
    yield from _coded(sync, largest, 1, 1 + replicas)
    yield passes(4, elements)  # three means begin as zeros or end divided; one is added to errors


def _coded(sync: SyncConfig, own: Segment, there: int, back: int) -> Iterator[Arithmetic]:
    """Yields the arithmetic of compressing a segment so often, and of adding what it stands for."""
    elements, groups = sum(own.lengths), len(own.groups)
    packs: tuple[Kind, Kind] = CODED["top_k" if sync.top_k else sync.quantise]
    for kind, count in zip(packs, (there, back), strict=True):
        yield Arithmetic(kind, count * elements, count * groups)
        yield passes(count, elements, sum(map(len, own.groups)))


def _fragments(sync: SyncConfig, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """The parameters of each fragment."""
    found: list[dict[str, int]] = [{} for _ in range(sync.fragments)]
    for name, size in sizes.items():
        found[fragment_of(name, sync.fragments)][name] = size
    return found


def diloco_state(sync: SyncConfig, width: int) -> float:
    """Bytes of state per owned element: outer weights, their momentum and the error, each as wide
    as master weights."""
    _, momentum = sync.outer_rule
    return float(max(4, width) * (1 + bool(momentum) + sync.compressed))


def _phases(
    sync: SyncConfig, replicas: int, sizes: Mapping[str, int], width: int
) -> tuple[float, float]:
    """Bytes that an exchange sends at once, and of a second phase."""
    others = replicas - 1
    if not sizes:
        return 0.0, 0.0
    if sync.top_k:
        return others * segment(sync, sizes).bytes, 0.0
    if sync.quantise:
        payloads = [each.bytes for each in segments(sync, sizes, replicas)]
        return others * sum(payloads) / replicas, others * max(payloads)
    values = sum(sizes.values()) + 1  # and how many replicas are in it
    return 2 * others * values * max(4, width) // replicas, 0.0
