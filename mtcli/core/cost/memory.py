"""Bytes per rank by construction: the parameters a rank holds, and what its schedule keeps.

Weights, gradients and optimizer state are counted from `Parameter.local_shape`, the shapes that
training allocates; what the backward pass waits for is counted in `activations.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import NamedTuple

from mtcli.core.cost.activations import (
    boundary_activations,
    embedding_activations,
    head_activations,
    layer_activations,
    turning_activations,
)
from mtcli.core.cost.hardware import Device
from mtcli.core.cost.in_flight import in_flight_chunks, splits, waiting
from mtcli.core.cost.working import block_working, head_working
from mtcli.core.cost.workload import Workload
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.model import parameters
from mtcli.core.spec.model_config import ModelConfig
from mtcli.core.spec.sharding import Parameter


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at the worst moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # what forwards keep for their backwards
    working: float  # what is there besides for a moment
    reserved: float  # the device's context and communication buffers

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
        kinds = ("weights", "gradients", "optimizer", "activations", "other", "total")
        return {name: round(getattr(self, name)) for name in kinds}


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
    return replace(stage, weights=weights, gradients=gradients, optimizer=optimizer)


def owner_of(work: Workload, rank: int) -> Owner:
    """Which of the ranks that share a parameter's rows a rank is."""
    place = work.layout.place(rank)
    return Owner(place["cp"] + work.layout.cp * place["dp"], place["edp"])


def memory_by_stage(work: Workload, device: Device) -> list[Memory]:
    """The bytes of the fullest rank of each pipeline rank: the first one."""
    chunks, vpp, last = in_flight_chunks(work), work.layout.vpp, work.layout.pp - 1
    cpu, found = device.name == "cpu", []
    layer = layer_activations(work, cpu)
    block, head = block_working(work, cpu), head_working(work, cpu)
    for pp_rank, held in enumerate(chunks):
        layers, is_last = work.layers_of_rank(pp_rank), pp_rank == last
        kept = held / vpp * (layers * layer + turning_activations(work))
        kept += waiting(work, pp_rank, layers * layer) - held * layers * layer * splits(work)
        kept += held / vpp * embedding_activations(work, cpu) if pp_rank == 0 else 0.0
        kept += held * (not is_last) * boundary_activations(work)
        heads = held if work.schedule_name == "gpipe" else 1
        end = heads * head_activations(work, cpu) if is_last else 0.0
        # The head's own are gone by the time that the last block's backward runs, and the block's
        # when its gradients are reduced.
        whole, ends = _gathered(work, pp_rank)
        freed = end + (0.0 if work.recompute == "full" else layer)
        working = max(block - end, _reduced(work) - freed) + whole
        working = max(working, ends + (head if is_last else 0.0))
        working = max(working, _given_back(work, pp_rank) - kept - end)
        state = state_bytes(work, pp_rank)
        found.append(Memory(*state, kept + end, working, device.reserved_bytes))
    return found


def _given_back(work: Workload, pp_rank: int) -> int:
    """Bytes of the rows that owners give back under zero=1: one share, and that of every rank."""
    held, size = rank_elements(work, pp_rank), work.sizes.weight
    cut = work.zero and max(work.layout.dp * work.layout.cp, work.layout.edp) > 1
    return (held.shard + held.padded) * size if cut and not _is_sharded(work) else 0


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


def _is_sharded(work: Workload) -> bool:
    """Whether zero=3 has data ranks to cut parameters over."""
    return work.zero == 3 and max(work.layout.dp * work.layout.cp, work.layout.edp) > 1


def _gathered(work: Workload, pp_rank: int) -> tuple[int, int]:
    """Bytes under zero=3 in a block's backward, and at the head: a block's weights and the buffer
    they came in, and the head's gradient, wide; at both embedding and head themselves."""
    if not _is_sharded(work):
        return 0, 0
    ends = rank_elements(work, pp_rank).total
    ends -= work.layers_of_rank(pp_rank) * block_elements(work).total
    vocabulary = parameters(work.model)["embedding.weight"].local_shape(work.layout)
    head = prod(vocabulary) * (pp_rank == work.layout.pp - 1)
    ends *= work.sizes.weight
    blocks = 2 * block_elements(work).total * work.sizes.weight
    return blocks + ends + head * work.sizes.gradient, ends


def _reduced(work: Workload) -> float:
    """Bytes while a block's gradients are reduced under zero=3: as they came, wide, those of the
    block before, whose buffer waits for the next one, and this rank's rows."""
    if not _is_sharded(work):
        return 0.0
    block, ranks = block_elements(work), work.layout.dp * work.layout.cp
    return block.total * (work.sizes.weight + work.sizes.gradient * (2 + 1 / ranks))


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
    attention = experts = shard = padded = untrained = 0
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
        else:
            attention += times * prod(local)
    return Held(attention, experts, shard, padded, untrained)


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
