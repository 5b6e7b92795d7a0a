"""Counts what 1-bit LAMB and 1-bit Adam send, keep and compute (sync/onebit.py)."""

from collections.abc import Iterator, Mapping

from mtcli.core.config.schema import OptimizerName
from mtcli.core.config.sync import SyncConfig
from mtcli.core.plan.arithmetic import Arithmetic, passes, times

# Elementwise operations of a frozen update beyond those of the optimizer's own, which is fused.
MORE_PASSES = 4
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


def onebit_arithmetic(
    sync: SyncConfig, steps: int, replicas: int, sizes: Mapping[str, int]
) -> Iterator[Arithmetic]:
    """Yields the mean arithmetic of a step on a rank that owns so many elements of each parameter.

    A momentum is updated and scaled, added to the error and squared; signs are packed for all
    servers, and unpacked from all replicas, and from all servers.
    """
    elements, tensors, n = sum(sizes.values()), len(sizes), replicas
    warm = min(sync.warmup(steps), steps)
    # vector, chunks to servers, the mean of n of them and back
    yield from times(warm / steps, [passes(4 + 1 / n, elements), passes(1, elements, tensors)])
    compressed = [
        passes(5, elements, tensors),  # momentum, scaled; error and its square
        Arithmetic("sign", elements * (1 + 1 / n), n + 1),
        Arithmetic("unsign", 2 * elements, 2 * n),
        passes(1, elements, n),  # to the server's error
        passes(1 / n, elements, tensors),  # squared
        passes(1, elements),  # of all servers, one after another
        passes(1 + MORE_PASSES, elements, tensors),  # divided by its scale, and taken
    ]
    yield from times((steps - warm) / steps, compressed)
