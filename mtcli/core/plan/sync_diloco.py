"""Bytes that `local` and `diloco` send and keep, without torch."""

from collections.abc import Mapping

from mtcli.core.config.sync import SyncConfig
from mtcli.core.config.sync_payload import exchange_steps, fragment_of, segment, segments


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
    for fragment in range(sync.fragments):
        own = {n: size for n, size in sizes.items() if fragment_of(n, sync.fragments) == fragment}
        first, every = exchange_steps(sync, fragment)
        for later, sent in zip((0, second), _phases(sync, replicas, own, width), strict=True):
            total += sent * max(0, 1 + (steps - later - first) // every)
    return total / steps


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
