"""How many devices a model needs: the fewest on which one of its layouts fits."""

from collections.abc import Iterator

from mtcli.core.config.fields import MAX_RANKS
from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.memory import fits
from mtcli.core.plan.request import PlanRequest, round_batch
from mtcli.core.plan.search import Candidate, legal_works, search

MOST_TRIED = 64  # counts of devices between one that does not fit and its double, which does


def fewest(config: RunConfig, request: PlanRequest) -> Candidate | None:
    """The quickest layout on the fewest devices, more than were asked for, that hold the model.

    Counts are whole nodes beyond the first. None where no number of devices is enough, and on a
    CPU, whose ranks share one memory.
    """
    if request.device.name == "cpu":
        return None
    low = request.world
    for high in _powers(low):
        if _sized(config, request, high):
            break
        low = high
    else:
        return None
    for world in _between(low, high, request.device):
        if sized := _sized(config, request, world):
            return search(sized, world, request.device, 1, request.pinned).best[0]
    raise AssertionError(f"{high} devices are enough, and none of those up to them are")


def _powers(above: int) -> Iterator[int]:
    power = 2
    while power <= MAX_RANKS:
        if power > above:
            yield power
        power *= 2


def _between(low: int, high: int, device: Device) -> Iterator[int]:
    """Counts above `low`, up to `high`: all within a node, and whole nodes beyond."""
    node = device.node_size
    yield from range(low + 1, min(node, high) + 1)
    nodes = range(max(low, node) // node + 1, high // node + 1)
    yield from (count * node for count in nodes[:: max(1, len(nodes) // MOST_TRIED)])
    yield high


def _sized(config: RunConfig, request: PlanRequest, world: int) -> RunConfig | None:
    """The config if a layout fits; a preset's batch gives way where no layout divides it."""
    batch = config.batch.global_batch_size
    sizes = [batch] if request.keeps_batch else [batch, round_batch(batch, world)]
    for size in sizes:
        wider = config.batch.model_copy(update={"global_batch_size": size})
        sized = config.model_copy(update={"batch": wider})
        if works := legal_works(sized, world, request.pinned):
            return sized if any(fits(work, request.device) for work in works) else None
    return None
