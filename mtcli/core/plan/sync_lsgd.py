"""Counts what LSGD sends along `replicas`, keeps and computes."""

from collections.abc import Iterator
from math import ceil, lcm, log2

from mtcli.core.config.sync import SyncConfig
from mtcli.core.plan.arithmetic import Arithmetic, passes

MESSAGE_BYTES = 3 * 8  # of a worker to all others: its number, steps and loss


def lsgd_bytes(sync: SyncConfig, steps: int, replicas: int, elements: int, width: int) -> float:
    """Bytes that a rank sends in a step, on average over the ranks of `replicas` and over a run.

    It holds `elements` master weights of `width` bytes. In a ring, n ranks send a broadcast n - 1
    times.
    """
    period, global_period = sync.steps_between, sync.steps_between_global
    locally, globally = steps // period, steps // global_period
    both = steps // lcm(period, global_period)
    total: float = (locally + globally - both) * (replicas - 1) * MESSAGE_BYTES
    size = elements * width
    workers = sync.workers_of_group(replicas)
    total += locally * (workers - 1) / workers * size * (sync.pull > 0.0)
    total += globally * (replicas - 1) / replicas * size * (sync.global_pull > 0.0)
    return total / steps


def lsgd_broadcasts(sync: SyncConfig, steps: int, replicas: int, tree: bool) -> float:
    """Copies of the weights that the busiest leader sends in a step, on average over a run: one to
    the next of a ring, or to the root's ceil(log2 n) neighbours in a tree of n."""
    return sum(
        times * (ceil(log2(ranks)) if tree else 1) for times, ranks in _pulls(sync, steps, replicas)
    )


def lsgd_arithmetic(
    sync: SyncConfig, steps: int, replicas: int, elements: int, tensors: int
) -> Iterator[Arithmetic]:
    """Yields the mean arithmetic of a step on a rank that owns elements of so many tensors: a copy
    of its weights, and their pull to the leader's."""
    for pulls, _ in _pulls(sync, steps, replicas):
        yield passes(pulls, elements)
        yield passes(pulls, elements, tensors)


def _pulls(sync: SyncConfig, steps: int, replicas: int) -> Iterator[tuple[float, int]]:
    """Yields (mean pulls per step, ranks among which a leader sends) in groups, and of all."""
    for period, pull, ranks in (
        (sync.steps_between, sync.pull, sync.workers_of_group(replicas)),
        (sync.steps_between_global, sync.global_pull, replicas),
    ):
        if pull > 0.0 and ranks > 1:
            yield steps // period / steps, ranks


def lsgd_state(sync: SyncConfig) -> float:
    """Bytes of state per element besides the optimizer's: none, only losses are kept."""
    return 0.0
