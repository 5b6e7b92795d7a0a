"""Bytes per rank by construction: the parameters a rank holds, and what its schedule keeps.

Weights, gradients and optimizer state are counted from `Parameter.local_shape`, the shapes that
training allocates; all else of a step is counted on a tape (`taped_stage.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from operator import mul
from typing import NamedTuple

from mtcli.core.cost.given_back import given_back
from mtcli.core.cost.hardware import Device
from mtcli.core.cost.in_flight import Counts, Moments, moments
from mtcli.core.cost.shapes import turning_bytes
from mtcli.core.cost.taped_ops import Kernels
from mtcli.core.cost.taped_sharding import Group
from mtcli.core.cost.taped_stage import Passed, passed
from mtcli.core.cost.workload import Precision, Workload
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.model import parameters
from mtcli.core.spec.model_config import ModelConfig
from mtcli.core.spec.owning import cuts_parameters
from mtcli.core.spec.sharding import Parameter


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


class Owner(NamedTuple):
    """Which of the data ranks a rank is: of those that share attention, and an expert."""

    data: int = 0
    edp: int = 0


FIRST = Owner()


class Held(NamedTuple):
    """Elements on a rank: on the attention grid, on the expert grid, and cut over data ranks.

    `shard` is one data rank's rows, of which the first one has as many as any, and `padded` what
    all of them take when each has as many as that. `untrained` come on top: they have no gradient
    and are never cut.
    """

    attention: int = 0
    experts: int = 0
    shard: int = 0
    padded: int = 0
    padded_experts: int = 0
    untrained: int = 0

    @property
    def total(self) -> int:
        """Trained elements of both grids."""
        return self.attention + self.experts


def memory(work: Workload, device: Device) -> Memory:
    """The bytes of the rank that holds most."""
    return max(memory_by_stage(work, device), key=lambda m: m.total)


def fullest_rank(work: Workload, device: Device) -> int:
    """The rank that holds most; the first of those that hold as much."""
    totals = [m.total for m in memory_by_stage(work, device)]
    return work.layout.attention.rank(pp=totals.index(max(totals)))


def rank_memory(work: Workload, device: Device, rank: int) -> Memory:
    """The bytes of one rank. Of rows that do not divide, the last data ranks hold fewer."""
    place = work.layout.place(rank)
    weights, gradients, optimizer = state_bytes(work, place["pp"], owner_of(work, rank))
    stage = memory_by_stage(work, device)[place["pp"]]
    working = stage.working
    if _is_sharded(work):  # FSDP2 keeps as many rows of each parameter as the first rank has
        width = work.sizes.master or work.sizes.weight
        shares = [
            rank_elements(work, place["pp"], owner).shard for owner in (FIRST, owner_of(work, rank))
        ]
        working += (shares[0] - shares[1]) * width
    return replace(
        stage, weights=weights, gradients=gradients, optimizer=optimizer, working=working
    )


def owner_of(work: Workload, rank: int) -> Owner:
    """Which of the ranks that share a parameter's rows a rank is."""
    place = work.layout.place(rank)
    return Owner(place["cp"] + work.layout.cp * place["dp"], place["edp"])


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
    sizes = [*(run.kept for run in runs), *(run.left for run in runs)]

    def level(held: Sequence[Counts]) -> float:
        return max((sum(map(mul, counts, sizes)) for counts in held), default=0.0)

    kept = level(most.between)
    within = [
        level(held) - run.kept + peak
        for run, forward, backward in zip(runs, most.forward, most.backward, strict=True)
        for held, peak in ((forward, run.forward), (backward, run.backward))
    ]
    return kept, max(kept, *within)


def _runs(work: Workload, kernels: Kernels, pp_rank: int) -> list[Passed]:
    """Each of a pipeline rank's stages; the first one's positions serve them all."""
    last, groups = work.layout.num_stages - 1, _groups(work, pp_rank)
    first, *others = (
        passed(work, kernels, (stage == 0, stage == last), work.layers_of_stage[stage], groups)
        for stage in work.layout.stages(pp_rank)
    )
    return [first.beside(turning_bytes(work)), *others]


def state_bytes(work: Workload, pp_rank: int, owner: Owner = FIRST) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state (masters and moments) on a pipeline rank.

    zero=1 cuts the optimizer state along each parameter's first dimension over the data ranks
    (dp*cp, of experts edp), whose gradients are padded to equal shares; zero=3 cuts all three, and
    the weights it keeps are the masters. Untrained weights are whole and as wide as gradients.
    """
    held, sizes = rank_elements(work, pp_rank, owner), work.sizes
    untrained = held.untrained * sizes.gradient
    if _is_sharded(work):
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
    again = work.sizes.weight if _is_sharded(work) and work.sizes.master else 0  # from masters
    return weights + optimizer + rank_elements(work, pp_rank).shard * again


def _is_sharded(work: Workload) -> bool:
    return cuts_parameters(work.zero, work.layout, work.model)


def _groups(work: Workload, pp_rank: int) -> tuple[Group, ...]:
    """What zero=3 gathers together: a block, its experts, and a rank's ends. The head's gradient is
    reduced by itself."""
    if not _is_sharded(work):
        return ()
    sizes, layout = work.sizes, work.layout
    block, rank = block_elements(work), rank_elements(work, pp_rank)
    ends = rank.padded - work.layers_of_rank(pp_rank) * block.padded
    head = parameters(work.model)["embedding.weight"].local_shape(layout)
    reduced = ends - prod(head) * (pp_rank == layout.pp - 1 and not _ties(work))
    data = layout.dp * layout.cp
    last = {  # in the order of the modules
        parameter.is_expert: prod(parameter.local_shape(layout))
        for parameter, times in _parts(work.model, 1, (False, False))
        if times and parameter.trained
    }
    return (
        _group(sizes, block.padded - block.padded_experts, data, last[False]),
        _group(sizes, block.padded_experts, layout.edp, last.get(True, 0)),
        Group("ends", ends * sizes.weight, reduced * sizes.gradient, data),
    )


def _group(sizes: Precision, elements: int, ranks: int, last: int) -> Group:
    weights, wide = elements * sizes.weight, elements * sizes.gradient
    return Group("", weights, wide, ranks, last * sizes.weight)


def _ties(work: Workload) -> bool:
    """Whether one rank has both ends of one table."""
    return work.layout.num_stages == 1 and work.model.tie_embeddings


def rank_elements(work: Workload, pp_rank: int, owner: Owner = FIRST) -> Held:
    """Elements of the weights that a rank of this pipeline rank holds, padding included."""
    layers = work.layers_of_rank(pp_rank)
    ends = (pp_rank == 0, pp_rank == work.layout.pp - 1)
    return _elements(work.model, work.layout, layers, ends, owner)


def block_elements(work: Workload) -> Held:
    """Elements of one block on a rank."""
    return _elements(work.model, work.layout, 1, (False, False), FIRST)


@cache
def _elements(
    model: ModelConfig,
    layout: ParallelLayout,
    layers: int,
    ends: tuple[bool, bool],
    owner: Owner,
) -> Held:
    attention = experts = shard = padded = of_experts = untrained = 0
    for parameter, times in _parts(model, layers, ends):
        local = parameter.local_shape(layout)
        if not parameter.trained:
            untrained += times * prod(local)
            continue
        ranks = layout.edp if parameter.is_expert else layout.dp * layout.cp
        rows, *columns = parameter.stored_shape(layout)
        each = -(-rows // ranks)
        first = (owner.edp if parameter.is_expert else owner.data) * each
        shard += times * max(0, min(each, rows - first)) * prod(columns)
        padded += times * ranks * each * prod(columns)
        if parameter.is_expert:
            experts += times * prod(local)
            of_experts += times * ranks * each * prod(columns)
        else:
            attention += times * prod(local)
    return Held(attention, experts, shard, padded, of_experts, untrained)


def _parts(
    model: ModelConfig, layers: int, ends: tuple[bool, bool]
) -> Iterable[tuple[Parameter, int]]:
    """Each parameter of a pipeline rank and how often it holds one; all blocks are alike."""
    first, last = ends
    for parameter in parameters(model.model_copy(update={"num_layers": 1})).values():
        if parameter.owner == "first":
            tied = last and model.tie_embeddings and parameter.name == "embedding.weight"
            yield parameter, int(first or tied)
        else:
            yield parameter, int(last) if parameter.owner == "last" else layers
