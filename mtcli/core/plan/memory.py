"""Bytes per rank by construction: the parameters a rank holds, and what its schedule keeps.

Weights, gradients and optimizer state are counted from `Parameter.local_shape`, the shapes that
training allocates; all else of a step is counted on a tape (`taped_stage.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import mul

from mtcli.core.plan.elements import (
    FIRST,
    Owner,
    gathered_groups,
    is_sharded,
    owner_of,
    rank_elements,
)
from mtcli.core.plan.given_back import given_back
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.in_flight import Counts, Moments, moments
from mtcli.core.plan.shapes import Shapes, turning_bytes
from mtcli.core.plan.taped_ops import Kernels
from mtcli.core.plan.taped_stage import Passed, passed
from mtcli.core.plan.workload import Workload


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at the worst moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # what forwards keep for their backwards
    working: float  # what is there besides for a moment
    reserved: float  # the device's context and communication buffers; on CPU `host` as well
    host: float  # of host memory, in which a save's copy waits while it is written

    @property
    def other(self) -> float:
        """What is neither state nor kept by a forward."""
        return self.working + self.reserved

    @property
    def besides_state(self) -> float:
        """All that a step allocates."""
        return self.activations + self.working

    @property
    def total(self) -> float:
        """The sum of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.other

    def as_dict(self) -> dict[str, int]:
        """The kinds and their total, in whole bytes."""
        kinds = ("weights", "gradients", "optimizer", "activations", "other")
        found = {name: round(getattr(self, name)) for name in kinds}
        return found | {"total": sum(found.values())}


def memory(work: Workload, device: Device) -> Memory:
    """The bytes of the rank that holds most."""
    return max(memory_by_stage(work, device), key=lambda m: m.total)


def fullest_rank(work: Workload, device: Device) -> int:
    """The rank that holds most; the first of those that hold as much."""
    totals = [m.total for m in memory_by_stage(work, device)]
    return work.layout.attention.rank(pp=totals.index(max(totals)))


def rank_memory(work: Workload, device: Device, rank: int) -> Memory:
    """The bytes of one rank. Of rows that do not divide, the last data ranks hold fewer."""
    place = work.layout.coordinates(rank)
    weights, gradients, optimizer = state_bytes(work, place["pp"], owner_of(work, rank))
    stage = memory_by_stage(work, device)[place["pp"]]
    working = stage.working
    if is_sharded(work):  # FSDP2 keeps as many rows of each parameter as the first rank has
        width = work.sizes.master or work.sizes.weight
        shares = [
            rank_elements(work, place["pp"], owner).shard for owner in (FIRST, owner_of(work, rank))
        ]
        working += (shares[0] - shares[1]) * width
    return replace(
        stage, weights=weights, gradients=gradients, optimizer=optimizer, working=working
    )


def memory_by_stage(work: Workload, device: Device) -> list[Memory]:
    """The bytes of the fullest rank of each pipeline rank: the first one."""
    return list(each_stage(work, device))


def each_stage(work: Workload, device: Device) -> Iterator[Memory]:
    """`memory_by_stage`, each counted as it is asked for."""
    kernels = Kernels.of(device)
    for pp_rank in range(work.layout.pp):
        kept, peak = _in_flight(_runs(work, kernels, pp_rank), moments(work, pp_rank))
        working = max(peak, given_back(work, pp_rank)) - kept
        state, host = state_bytes(work, pp_rank), copied_bytes(work, pp_rank) * work.async_save
        yield Memory(*state, kept, working, device.reserved_bytes + host * kernels.cpu, host)


def _in_flight(runs: Sequence[Passed], most: Moments) -> tuple[float, float]:
    """(what a rank keeps between ops, and within one, at most) of its stages' micro-batches."""
    sizes = [
        *chain(*zip(*((run.kept, run.left, run.gathered, run.sent) for run in runs), strict=True))
    ]

    def level(held: Sequence[Counts]) -> float:
        return max((sum(map(mul, counts, sizes)) for counts in held), default=0.0)

    kept = level(most.between)
    within = [
        level(held) - own + peak
        for run, *moments in zip(runs, most.forward, most.backward, most.rest, strict=True)
        for held, (own, peak) in zip(moments, run.peaks, strict=True)
    ]
    return kept, max(kept, *within)


def _runs(work: Workload, kernels: Kernels, pp_rank: int) -> list[Passed]:
    """Each of a pipeline rank's stages; the first one's positions serve them all."""
    first, *others = (_run(work, kernels, stage) for stage in work.layout.stages(pp_rank))
    if not work.layers_of_rank(pp_rank):  # no backward reads positions
        return [first, *others]
    return [first.beside(turning_bytes(work)), *others]


def _run(work: Workload, kernels: Kernels, stage: int) -> Passed:
    ends = (stage == 0, stage == work.layout.num_stages - 1)
    run = passed(work, kernels, ends, work.layers_of_stage[stage], gathered_groups(work, ends))
    if stage and work.layout.pp == 1:  # its input is what the stage before it keeps as its result
        return run.beside(-Shapes.of(work).stream)
    return run


def state_bytes(work: Workload, pp_rank: int, owner: Owner = FIRST) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state (masters and moments) on a pipeline rank.

    zero=1 cuts the optimizer state along each parameter's first dimension over the data ranks
    (dp*cp, of experts edp), whose gradients are padded to equal shares; zero=3 cuts all three, and
    the weights it keeps are the masters. Untrained weights are whole and as wide as gradients.
    """
    held, sizes = rank_elements(work, pp_rank, owner), work.sizes
    untrained = held.untrained * sizes.gradient
    if is_sharded(work):
        kept, width = held.shard, sizes.master or sizes.weight
        return kept * width + untrained, kept * sizes.gradient, kept * sizes.moments
    state = held.shard if work.zero else held.total
    gradients = held.padded if work.zero == 1 else held.total
    return (
        held.total * sizes.weight + untrained,
        gradients * sizes.gradient,
        state * (sizes.master + sizes.moments),
    )


def copied_bytes(work: Workload, pp_rank: int) -> int:
    """Bytes that a pipeline rank's first data rank saves: weights as they compute, and the
    optimizer's masters and moments."""
    weights, _, optimizer = state_bytes(work, pp_rank)
    again = work.sizes.weight if is_sharded(work) and work.sizes.master else 0  # from masters
    return weights + optimizer + rank_elements(work, pp_rank).shard * again
