"""Bytes per rank by construction: the parameters a rank holds, and what its schedule keeps.

Weights, gradients and optimizer state are counted from `Parameter.local_shape`, the shapes that
training allocates; what the backward pass waits for is counted in `activations.py`.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from mtcli.core.cost.activations import (
    embedding_activations,
    head_activations,
    layer_activations,
    logits_bytes,
    output_gradients,
    recomputed_block,
)
from mtcli.core.cost.hardware import Device
from mtcli.core.cost.workload import Workload
from mtcli.core.schedule.check import in_flight
from mtcli.core.schedule.generators import schedule_for
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.model import parameters
from mtcli.core.spec.model_config import ModelConfig
from mtcli.core.spec.sharding import Parameter


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    other: float

    @property
    def total(self) -> float:
        """The sum of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.other

    def as_dict(self) -> dict[str, int]:
        """The kinds and their total, in whole bytes."""
        return {name: round(value) for name, value in {**asdict(self), "total": self.total}.items()}


class Held(NamedTuple):
    """Elements on a rank: on the attention grid, on the expert grid, and cut over data ranks.

    `shard` is the first data rank's rows, which are as many as any's, and `padded` what all of them
    take when each has as many. `untrained` come on top: they have no gradient and are never cut.
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


def memory_by_stage(work: Workload, device: Device) -> list[Memory]:
    """The bytes of a rank of each pipeline rank; ranks that share one hold the same."""
    chunks, vpp, last = _in_flight(work), work.layout.vpp, work.layout.pp - 1
    saved, again = layer_activations(work), recomputed_block(work)
    waiting = output_gradients(work)
    found = []
    for pp_rank, held in enumerate(chunks):
        weights, gradients, optimizer = state_bytes(work, pp_rank)
        kept = held / vpp * work.layers_of_rank(pp_rank) * saved
        kept += _waiting_halves(work, pp_rank) * work.layers_of_rank(pp_rank) * waiting
        kept += held / vpp * embedding_activations(work) if pp_rank == 0 else 0.0
        kept += head_activations(work) if pp_rank == last else 0.0
        # For a moment only: a block computed again, or the gradient of the logits.
        moment = max(again, logits_bytes(work) if pp_rank == last else 0.0)
        other = device.reserved_bytes + moment + _gathered(work, pp_rank)
        found.append(Memory(weights, gradients, optimizer, kept, other))
    return found


def state_bytes(work: Workload, pp_rank: int) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state (masters and moments) on a pipeline rank.

    zero=1 cuts the optimizer state along each parameter's first dimension over the data ranks
    (dp*cp, of experts edp), whose gradients are padded to equal shares; zero=3 cuts all three, and
    the weights it keeps are the masters. Untrained weights are whole and as wide as gradients.
    """
    held, sizes = rank_elements(work, pp_rank), work.sizes
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


def _gathered(work: Workload, pp_rank: int) -> int:
    """Bytes of whole weights under zero=3: two blocks, and embedding and head all the time."""
    if not _is_sharded(work):
        return 0
    ends = rank_elements(work, pp_rank).total
    ends -= work.layers_of_rank(pp_rank) * block_elements(work).total
    return work.sizes.weight * (2 * block_elements(work).total + ends)


def rank_elements(work: Workload, pp_rank: int) -> Held:
    """Elements of the weights that a rank of this pipeline rank holds, padding included."""
    layers = work.layers_of_rank(pp_rank)
    ends = (pp_rank == 0, pp_rank == work.layout.pp - 1)
    return _elements(work.model, work.layout, layers, ends)


def block_elements(work: Workload) -> Held:
    """Elements of one block on a rank."""
    return _elements(work.model, work.layout, 1, (False, False))


@cache
def _elements(
    model: ModelConfig, layout: ParallelLayout, layers: int, ends: tuple[bool, bool]
) -> Held:
    attention = experts = shard = padded = untrained = 0
    for parameter, times in _parts(model, layers, ends):
        local = parameter.local_shape(layout)
        if not parameter.trained:
            untrained += times * prod(local)
            continue
        ranks = layout.edp if parameter.is_expert else layout.dp * layout.cp
        stored = parameter.stored_shape(layout)
        rows = times * -(-stored[0] // ranks) * prod(stored[1:])
        shard, padded = shard + rows, padded + ranks * rows
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


def _in_flight(work: Workload) -> tuple[int, ...]:
    """Chunks of activations per pipeline rank; only gpipe keeps every micro-batch."""
    if work.layout.pp == 1:
        return (work.layout.vpp,)
    every = work.schedule_name == "gpipe"
    count = work.num_micro_batches if every else work.representative
    return _chunks(work.schedule_name, work.layout.pp, work.layout.vpp, count)


def _waiting_halves(work: Workload, pp_rank: int) -> int:
    """Micro-batches whose weight half a rank of zero_bubble has still to run, at its peak."""
    split = work.schedule_name == "zero_bubble" and work.layout.pp > 1
    return min(work.num_micro_batches, pp_rank + 1) if split else 0


@cache
def _chunks(name: str, pp: int, vpp: int, count: int) -> tuple[int, ...]:
    return in_flight(schedule_for(name, pp, vpp, count))
