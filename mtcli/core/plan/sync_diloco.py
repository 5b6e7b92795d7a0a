"""Bytes that `local` and `diloco` send, and that they keep, without torch."""

from mtcli.core.config.sync import SyncConfig
from mtcli.core.config.sync_payload import BLOCK, CHUNK, Payload


def diloco_bytes(
    sync: SyncConfig, steps: int, replicas: int, elements: int, width: int
) -> float:
    """Mean bytes per step of a run that a rank sends along `replicas`.

    It owns `elements` weights of `width` bytes; fragments count as equally large. In full an
    exchange is a ring's all-reduce of master weights, 2 (n-1)/n of them. Dense quantised values are
    scattered and gathered, (n-1)/n of the payload each; of the largest all replicas receive all.
    """
    others = replicas - 1
    if sync.top_k:
        each = others * _payload(sync, elements, CHUNK)
    elif sync.quantise:
        each = 2 * others / replicas * _payload(sync, elements, BLOCK)
    else:
        each = 2 * others / replicas * elements * max(4, width)
    return each * _events(sync, steps) / steps


def diloco_state(sync: SyncConfig, width: int) -> float:
    """Bytes of state per owned element: outer weights, their momentum and the error, each as wide
    as master weights."""
    _, momentum = sync.outer_rule
    return float(max(4, width) * (1 + bool(momentum) + sync.compressed))


def _payload(sync: SyncConfig, elements: int, group: int) -> float:
    """Bytes of so many values, most of which lie in full blocks or chunks."""
    return elements / group * sum(Payload.of(sync, group).sizes(group))


def _events(sync: SyncConfig, steps: int) -> float:
    """Exchanges of all weights in a run, of which a fragment's are one by the fragments."""
    period = sync.steps_between
    turns = (period * (index + 1) // sync.fragments for index in range(sync.fragments))
    return sum(1 + (steps - turn) // period for turn in turns if turn <= steps) / sync.fragments
