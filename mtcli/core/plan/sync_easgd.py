"""Counts what EASGD sends along `replicas`, and the state that it keeps."""

from mtcli.core.config.sync import SyncConfig


def easgd_bytes(sync: SyncConfig, steps: int, replicas: int, elements: int, width: int) -> float:
    """Bytes that a rank sends in a step, on average over a run: an all-reduce in each exchange.

    It holds `elements` master weights of `width` bytes.
    """
    exchanges = steps // sync.steps_between if sync.pull else 0
    return exchanges * 2 * (replicas - 1) / replicas * elements * width / steps


def easgd_state(sync: SyncConfig, width: int) -> float:
    """Bytes of state per element besides the optimizer's: the centre's, as wide as the masters."""
    return float(width)
