"""Bytes of an update under zero=1, when owners give every rank the rows that they have updated."""

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Parameter, owner_axes
from mtcli.core.plan.workload import Workload


def given_back(work: Workload, pp_rank: int) -> float:
    """Bytes of the rows that owners give back under zero=1: each one's share, that of every rank,
    and the last two parameters that are laid out from it."""
    if work.zero != 1:
        return 0.0
    shared = laid = 0.0
    cut = (work.layout, work.sequence_parallel)
    for stage in work.layout.stages(pp_rank):
        ends = (stage == 0, stage == work.layout.num_stages - 1)
        layers = work.layers_of_stage[stage]
        for ranks, members in _padded_sizes(work.model, cut, layers, ends):
            if ranks > 1:
                shared += sum(size for size, _ in members) * (1 + 1 / ranks)
                laid = max(laid, _laid_out(members, work.bucket_bytes))
    return (shared + laid) * work.sizes.weight


def _laid_out(members: Sequence[tuple[int, int]], bucket_bytes: float) -> int:
    """Elements of two parameters that follow each other in a bucket, at most; one alone in its
    bucket lies there as it is."""
    most = held = before = 0
    for size, numel in reversed(members):
        if held and 4 * (held + numel) > bucket_bytes:
            held = 0
        most = max(most, before + size) if held else most
        held, before = held + numel, size
    return most


@cache
def _padded_sizes(
    model: ModelConfig, cut: tuple[ParallelLayout, bool], layers: int, ends: tuple[bool, bool]
) -> tuple[tuple[int, list[tuple[int, int]]], ...]:
    """(owners, (elements with every owner's rows padded, elements) of each parameter) of a stage,
    by the axes over which gradients are summed, which buckets do not mix."""
    layout, sequence_parallel = cut
    found: dict[tuple[str, ...], tuple[int, list[tuple[int, int]]]] = {}
    copied = model.tie_embeddings and layout.pp > 1  # on one rank both ends have one table
    for parameter in _in_order(model, layers, *ends, copied):
        axes = parameter.gradient_axes(layout, sequence_parallel)
        ranks = prod(layout.size(axis) for axis in owner_axes(parameter, layout, sequence_parallel))
        rows, *columns = parameter.stored_shape(layout)
        sizes = -(-rows // ranks) * ranks * prod(columns), rows * prod(columns)
        found.setdefault(axes, (ranks, []))[1].append(sizes)
    return tuple(found.values())


def _in_order(
    model: ModelConfig, layers: int, first: bool, last: bool, copied: bool
) -> Iterator[Parameter]:
    trained = [
        parameter
        for parameter in parameters(model.model_copy(update={"num_layers": 1})).values()
        if parameter.trained
    ]
    block = [p for p in trained if p.owner not in ("first", "last")]
    for p in trained:
        if p.owner == "first" and (first or (last and copied and p.name == "embedding.weight")):
            yield p
    for _ in range(layers):
        yield from block
    yield from (p for p in trained if p.owner == "last" and last)
