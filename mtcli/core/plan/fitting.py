"""Which layouts fit a device, without counting every byte of those that do not."""

from collections.abc import Iterable

from mtcli.core.plan.hardware import Device
from mtcli.core.plan.memory import each_stage, memory, state_bytes
from mtcli.core.plan.workload import Workload


def fits(work: Workload, device: Device) -> bool:
    """Whether every rank leaves the part of its device that goes to fragmentation."""
    if _least(work, device) > device.usable_bytes:
        return False
    return all(stage.total <= device.usable_bytes for stage in each_stage(work, device))


def smallest(works: Iterable[Workload], device: Device) -> Workload:
    """The one whose fullest rank holds the least.

    Those with less state come first, until the next one's state alone is more than the best has.
    """
    first, *rest = sorted(works, key=lambda work: _least(work, device))
    least = memory(first, device).total
    for work in rest:
        if _least(work, device) >= least:
            break
        if (total := memory(work, device).total) < least:
            first, least = work, total
    return first


def _least(work: Workload, device: Device) -> float:
    """Bytes that a rank of the pipeline's ends or middle holds at least: quick to know."""
    last = work.layout.pp - 1
    state = max(sum(state_bytes(work, pp_rank)) for pp_rank in {0, last // 2, last})
    return state + device.reserved_bytes
