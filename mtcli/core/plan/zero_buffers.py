"""Counts what ZeRO gathers: zero=3's groups of parameters, and zero=1's updated rows."""

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.mesh.sharding import Parameter, owner_axes
from mtcli.core.plan.elements import Run, is_sharded, parameter_copies
from mtcli.core.plan.tape.ops import Group
from mtcli.core.plan.workload import Workload


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
    parts = parameter_copies((model, LoraConfig()), layers, ends)
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
    block = [p for p in trained if p.layer not in ("first", "last")]
    for p in trained:
        if p.layer == "first" and (first or (last and copied and p.name == "embedding.weight")):
            yield p
    for _ in range(layers):
        yield from block
    yield from (p for p in trained if p.layer == "last" and last)


def _padded(parameter: Parameter, layout: ParallelLayout, ranks: int) -> int:
    """Elements where each of so many ranks has as many rows as the first."""
    rows, *columns = parameter.stored_shape(layout)
    return -(-rows // ranks) * ranks * prod(columns)
