"""Counts what EASGD sends along `replicas`, keeps and computes."""

from collections.abc import Iterator

from mtcli.core.config.sync import SyncConfig
from mtcli.core.plan.arithmetic import Arithmetic, passes


def easgd_bytes(sync: SyncConfig, steps: int, replicas: int, elements: int, width: int) -> float:
    """Bytes that a rank sends in a step, on average over a run: an all-reduce in each exchange.

    It holds `elements` master weights of `width` bytes.
    """
    return _exchanges(sync, steps) * 2 * (replicas - 1) / replicas * elements * width / steps


def easgd_arithmetic(
    sync: SyncConfig, steps: int, elements: int, tensors: int
) -> Iterator[Arithmetic]:
    """Yields the mean arithmetic of a step on a rank that owns elements of so many tensors: copies
    of weights and centre, the mean, and both pulls."""
    exchanges = _exchanges(sync, steps) / steps
    yield passes(3 * exchanges, elements)
    yield passes(2 * exchanges, elements, tensors)


def _exchanges(sync: SyncConfig, steps: int) -> int:
    return steps // sync.steps_between if sync.pull else 0


def easgd_state(sync: SyncConfig, width: int) -> float:
    """Bytes of state per element besides the optimizer's: the centre's, as wide as the masters."""
    return float(width)
