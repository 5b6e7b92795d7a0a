"""Elements of a rank's parameters and of zero=3's groups, and bytes of zero=1's all-gather."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters, stage_parameters
from mtcli.core.mesh.sharding import Parameter, owner_axes, shards_parameters
from mtcli.core.plan.tape.fsdp import Group
from mtcli.core.plan.workload import Workload

Run = tuple[ModelConfig, LoraConfig]  # a model, and what of it is trained


class Owner(NamedTuple):
    """A rank's index among the data ranks that share attention's rows, and an expert's."""

    data: int = 0
    edp: int = 0


FIRST = Owner()


class RankElements(NamedTuple):
    """Elements on a rank: on the attention grid, on the expert grid, and sharded over data ranks.

    `shard` is one data rank's rows, of which the first one has as many as any, and `padded` what
    all of them take when each has as many as that. `untrained` come on top: they have no gradient
    and are never sharded. `frozen` are so too, the weights that adapters are trained for.
    """

    attention: int = 0
    experts: int = 0
    shard: int = 0
    padded: int = 0
    untrained: int = 0
    frozen: int = 0

    @property
    def total(self) -> int:
        """Trained elements of both grids."""
        return self.attention + self.experts


def owner_of(work: Workload, rank: int) -> Owner:
    """A rank's index among the ranks that share a parameter's rows."""
    coordinates = work.layout.coordinates(rank)
    return Owner(coordinates["cp"] + work.layout.cp * coordinates["dp"], coordinates["edp"])


def rank_elements(work: Workload, pp_rank: int, owner: Owner = FIRST) -> RankElements:
    """Elements of the weights of a rank of this pipeline rank, padding included."""
    layers = work.layers_of_rank(pp_rank)
    ends = (pp_rank == 0, pp_rank == work.layout.pp - 1)
    return _elements((work.model, work.lora), work.layout, layers, ends, owner)


def trained_of_rank(work: Workload, pp_rank: int) -> Iterator[tuple[int, Parameter]]:
    """Yields the stage and trained parameters of a pipeline rank; a tied table that one rank holds
    for both ends counts once."""
    layout, names, table = work.layout, set[str](), run_parameters(work.model, work.lora)
    for stage in layout.stages(pp_rank):
        first = sum(work.layers_of_stage[:stage])
        layers = range(first, first + work.layers_of_stage[stage])
        ends = stage == 0, stage == layout.num_stages - 1
        for parameter in stage_parameters(table, layers, *ends):
            if parameter.trained and parameter.name not in names:
                names.add(parameter.name)
                yield stage, parameter


def block_elements(work: Workload) -> RankElements:
    """Elements of one block on a rank."""
    return _elements((work.model, work.lora), work.layout, 1, (False, False), FIRST)


def is_sharded(work: Workload) -> bool:
    """Whether each data rank holds some rows of the parameters."""
    return shards_parameters(work.zero, work.layout, work.model)


def gathered_groups(work: Workload, ends: tuple[bool, bool]) -> tuple[Group, ...]:
    """Groups of parameters that zero=3 gathers together on a stage (the first, the last, both or
    neither): a block, its experts, the ends; and those of the ends that only the head reads, whose
    gradients are reduced by themselves."""
    if not is_sharded(work):
        return ()
    block, outer = _trained(work.model, 1, (False, False)), _trained(work.model, 0, ends)
    dense = [parameter for parameter in block if not parameter.is_expert]
    experts = [parameter for parameter in block if parameter.is_expert]
    first, last = ends
    tied = last and not first
    head = [p for p in outer if p.name.startswith("head.") or (tied and p.tied)]
    rest = [parameter for parameter in outer if parameter not in head]
    data = work.layout.dp * work.layout.cp
    return (
        _group(work, "", data, dense, dense),
        _group(work, "", work.layout.edp, experts, experts),
        _group(work, "ends", data, outer, rest),
        _group(work, "ends", data, outer, head),
    )


def _trained(model: ModelConfig, layers: int, ends: tuple[bool, bool]) -> list[Parameter]:
    """Trained parameters in the order of the modules."""
    parts = _parts((model, LoraConfig()), layers, ends)
    return [parameter for parameter, times in parts if times and parameter.trained]


def _group(
    work: Workload,
    name: str,
    ranks: int,
    gathered: Sequence[Parameter],
    reduced: Sequence[Parameter],
) -> Group:
    sizes, layout = work.sizes, work.layout
    weights, wide = (sum(_padded(p, layout, ranks) for p in some) for some in (gathered, reduced))
    last = prod(reduced[-1].local_shape(layout)) if reduced else 0
    return Group(name, weights * sizes.weight, wide * sizes.gradient, ranks, last * sizes.weight)


def _padded(parameter: Parameter, layout: ParallelLayout, ranks: int) -> int:
    """Elements where each of so many ranks has as many rows as the first."""
    rows, *columns = parameter.stored_shape(layout)
    return -(-rows // ranks) * ranks * prod(columns)


@cache
def _elements(
    run: Run,
    layout: ParallelLayout,
    layers: int,
    ends: tuple[bool, bool],
    owner: Owner,
) -> RankElements:
    attention = experts = shard = padded = untrained = frozen = 0
    for parameter, times in _parts(run, layers, ends):
        local = parameter.local_shape(layout)
        if parameter.frozen:
            frozen += times * prod(local)
            continue
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
    return RankElements(attention, experts, shard, padded, untrained, frozen)


def _parts(run: Run, layers: int, ends: tuple[bool, bool]) -> Iterable[tuple[Parameter, int]]:
    """Yields each parameter of a pipeline rank with its number of copies; all blocks are alike."""
    (first, last), (model, lora) = ends, run
    for parameter in run_parameters(model.model_copy(update={"num_layers": 1}), lora).values():
        if parameter.owner == "first":
            yield parameter, int(first or (last and parameter.tied))
        else:
            yield parameter, int(last) if parameter.owner == "last" else layers


def update_bytes(work: Workload, pp_rank: int) -> float:
    """Bytes of zero=1's all-gather of updated rows: each owner's shard, all of them, and the last
    two parameters that are laid out from those."""
    if work.zero != 1:
        return 0.0
    shared = laid = 0.0
    sharding = (work.layout, work.sequence_parallel)
    for stage in work.layout.stages(pp_rank):
        ends = (stage == 0, stage == work.layout.num_stages - 1)
        layers = work.layers_of_stage[stage]
        for ranks, members in _padded_sizes((work.model, work.lora), sharding, layers, ends):
            if ranks > 1:
                shared += sum(size for size, _ in members) * (1 + 1 / ranks)
                laid = max(laid, _laid_out(members, work.bucket_bytes))
    return (shared + laid) * work.sizes.weight


def _laid_out(members: Sequence[tuple[int, int]], bucket_bytes: float) -> int:
    """Elements of two parameters that follow each other in a bucket, at most; one alone in its
    bucket is not laid out."""
    most = filled = before = 0
    for size, numel in reversed(members):
        if filled and 4 * (filled + numel) > bucket_bytes:
            filled = 0
        most = max(most, before + size) if filled else most
        filled, before = filled + numel, size
    return most


@cache
def _padded_sizes(
    run: Run, sharding: tuple[ParallelLayout, bool], layers: int, ends: tuple[bool, bool]
) -> tuple[tuple[int, list[tuple[int, int]]], ...]:
    """(owners, (elements with every owner's rows padded, elements) of each parameter) of a stage,
    by the axes over which gradients are summed, which buckets do not mix."""
    layout, sequence_parallel = sharding
    by_axes: dict[tuple[str, ...], tuple[int, list[tuple[int, int]]]] = {}
    copied = run[0].tie_embeddings and layout.pp > 1  # on one rank both ends have one table
    for parameter in _in_order(run, layers, ends, copied):
        axes = parameter.gradient_axes(layout, sequence_parallel)
        ranks = prod(layout.size(axis) for axis in owner_axes(parameter, layout, sequence_parallel))
        sizes = _padded(parameter, layout, ranks), prod(parameter.stored_shape(layout))
        by_axes.setdefault(axes, (ranks, []))[1].append(sizes)
    return tuple(by_axes.values())


def _in_order(run: Run, layers: int, ends: tuple[bool, bool], copied: bool) -> Iterator[Parameter]:
    (first, last), (model, lora) = ends, run
    trained = [
        parameter
        for parameter in run_parameters(model.model_copy(update={"num_layers": 1}), lora).values()
        if parameter.trained
    ]
    block = [p for p in trained if p.owner not in ("first", "last")]
    for p in trained:
        if p.owner == "first" and (first or (last and copied and p.name == "embedding.weight")):
            yield p
    for _ in range(layers):
        yield from block
    yield from (p for p in trained if p.owner == "last" and last)
