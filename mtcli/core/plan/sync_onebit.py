"""Bytes that 1-bit LAMB and 1-bit Adam send, and those that they keep (sync/onebit.py)."""

from mtcli.core.config.schema import OptimizerName
from mtcli.core.config.sync import SyncConfig

SCALARS = 8, 8  # bytes of a replica's scale, which is gathered, and of the sum that servers reduce


def onebit_bytes(sync: SyncConfig, steps: int, replicas: int, elements: int, width: int) -> float:
    """Mean bytes of a step that a rank sends to other replicas, where it owns some elements.

    In the warm-up they have the `width` of weights, and then a bit each. Both ways are a
    reduce-scatter and an all-gather: 2 (n-1)/n of the bytes.
    """
    n, warm = replicas, min(sync.warmup(steps), steps)
    both_ways = 2 * (n - 1) / n
    compressed = both_ways * elements / 8 + (n - 1) * SCALARS[0] + both_ways * SCALARS[1]
    return (warm * both_ways * elements * width + (steps - warm) * compressed) / steps


def onebit_state(optimizer: OptimizerName, replicas: int, width: int) -> float:
    """Bytes of state per owned element, besides the optimizer's: the errors of what a replica and
    its server send, and LAMB's fresh variance. `width` is that of a weight."""
    wide = max(4, width)
    errors = wide * (1 + 1 / replicas) if replicas > 1 else 0.0
    return errors + wide * (optimizer == "lamb")
