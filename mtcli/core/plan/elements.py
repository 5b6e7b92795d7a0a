"""Counts the elements of a rank's parameters, on both grids and sharded over data ranks."""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig, OptimizerConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters, stage_parameters
from mtcli.core.mesh.sharding import Parameter, needs_no_copy, shards_parameters
from mtcli.core.mesh.update_rules import RuleFacts, update_of
from mtcli.core.plan.workload import BlockCounts, Workload

Run = tuple[ModelConfig, LoraConfig, tuple[str, ...]]  # a model, and what of it is trained


class Owner(NamedTuple):
    """A rank's index among the ranks that divide attention parameters' rows, experts', and those
    of experts that etp ranks replicate."""

    data: int = 0
    edp: int = 0
    copies: int = 0

    def share(self, parameter: Parameter, layout: ParallelLayout) -> tuple[int, int]:
        """(index, number) of the ranks that divide a parameter's rows."""
        if not parameter.is_expert:
            return self.data, layout.dp * layout.cp
        if "etp" in parameter.shard_axes:
            return self.edp, layout.edp
        return self.copies, layout.edp * layout.etp


FIRST = Owner()
ONE_BLOCK = BlockCounts(0, 1)


class RuleElements(NamedTuple):
    """The elements on a rank that one update rule updates: in all, and in its shard over data
    ranks."""

    rule: RuleFacts
    total: int
    shard: int


class RankElements(NamedTuple):
    """Elements on a rank: on the attention grid, on the expert grid, and sharded over data ranks.

    `shard` are the rows of one data rank; the first data rank has the most. `padded` is `shard` of
    the first rank times the data ranks. `copied` are those that zero=1 copies to gather them from
    their owners, a rank's and all of them, and `widest` the most of one parameter. `untrained`
    (routers' biases, never sharded) and `frozen` are not in the other counts and have no gradient;
    zero=3 has `frozen_shard` of the frozen.
    """

    attention: int = 0
    experts: int = 0
    shard: int = 0
    padded: int = 0
    copied: int = 0
    widest: int = 0
    untrained: int = 0
    frozen: int = 0
    frozen_shard: int = 0
    rules: tuple[RuleElements, ...] = ()

    @property
    def total(self) -> int:
        """Trained elements of both grids."""
        return self.attention + self.experts

    def moments(self, sharded: bool) -> int:
        """Elements of the optimizer's moments."""
        return sum(len(r.rule.moments) * (r.shard if sharded else r.total) for r in self.rules)


def owner_of(work: Workload, rank: int) -> Owner:
    """A rank's index among the ranks that divide a parameter's rows."""
    layout, coordinates = work.layout, work.layout.coordinates(rank)
    copies = coordinates["etp"] + layout.etp * coordinates["edp"]
    data = coordinates["cp"] + layout.cp * coordinates["dp"]
    return Owner(data, coordinates["edp"], copies)


def rank_elements(work: Workload, pp_rank: int, owner: Owner = FIRST) -> RankElements:
    """The elements of the weights of a rank of pipeline rank `pp_rank`, padding included."""
    blocks = work.block_counts(work.layout.stages(pp_rank))
    ends = (pp_rank == 0, pp_rank == work.layout.pp - 1)
    return _elements(work.run, work.optimizer, work.layout, blocks, ends, owner)


def trained_of_rank(work: Workload, pp_rank: int) -> list[tuple[int, Parameter]]:
    """(stage, parameter) of a pipeline rank's trained parameters; a tied table counts once where
    one rank has both ends."""
    stages = tuple(work.layout.stages(pp_rank))
    return _trained(work.run, stages, work.layers_of_stage)


@lru_cache(maxsize=256)
def _trained(
    run: Run, stages: Sequence[int], layers_of_stage: tuple[int, ...]
) -> list[tuple[int, Parameter]]:
    found: dict[str, tuple[int, Parameter]] = {}
    for stage in stages:
        first = sum(layers_of_stage[:stage])
        layers = range(first, first + layers_of_stage[stage])
        ends = stage == 0, stage == len(layers_of_stage) - 1
        for parameter in stage_parameters(run_parameters(*run), layers, *ends):
            if parameter.trained:
                found.setdefault(parameter.name, (stage, parameter))
    return list(found.values())


def block_elements(work: Workload) -> RankElements:
    """The elements of a block; of a mixture's, one with experts."""
    last = ONE_BLOCK._replace(layers=(work.model.num_layers - 1,))
    return _elements(work.run, work.optimizer, work.layout, last, (False, False), FIRST)


def is_sharded(work: Workload) -> bool:
    """Whether data ranks shard the parameters (zero=3)."""
    return shards_parameters(work.zero, work.layout, work.model)


@cache
def _elements(
    run: Run,
    optimizer: OptimizerConfig,
    layout: ParallelLayout,
    blocks: BlockCounts,
    ends: tuple[bool, bool],
    owner: Owner,
) -> RankElements:
    attention = experts = shard = padded = untrained = copied = widest = 0
    frozen = frozen_shard = 0
    rules: dict[RuleFacts, RuleElements] = {}
    for parameter, times in parameter_copies(run, blocks, ends):
        local = parameter.local_shape(layout)
        owned_by, ranks = owner.share(parameter, layout)
        rows, *columns = parameter.stored_shape(layout)
        share = -(-rows // ranks)
        first = owned_by * share
        total, owned = times * prod(local), times * max(0, min(share, rows - first)) * prod(columns)
        if parameter.frozen:
            frozen, frozen_shard = frozen + total, frozen_shard + owned
            continue
        if not parameter.trained:
            untrained += total
            continue
        shard += owned
        padded += times * ranks * share * prod(columns)
        if times and ranks > 1 and not needs_no_copy(rows, rows * prod(columns), ranks):
            copied += times * (ranks + 1) * share * prod(columns)
            widest = max(widest, ranks * share * prod(columns))
        rule = update_of(parameter, optimizer).rule
        counted = rules.get(rule, RuleElements(rule, 0, 0))
        rules[rule] = RuleElements(rule, counted.total + total, counted.shard + owned)
        if parameter.is_expert:
            experts += total
        else:
            attention += total
    by_rule = tuple(rules.values())
    counts = attention, experts, shard, padded, copied, widest, untrained, frozen, frozen_shard
    return RankElements(*counts, by_rule)


def parameter_copies(
    run: Run, blocks: BlockCounts, ends: tuple[bool, bool]
) -> Iterator[tuple[Parameter, int]]:
    """Yields (parameter, number of copies) of a pipeline rank, as blocks of a kind are alike."""
    (first, last), (model, lora, freeze) = ends, run
    if freeze:  # blocks differ
        table = stage_parameters(run_parameters(*run), blocks.layers, first, last)
        yield from ((parameter, 1) for parameter in table)
        return
    kinds = blocks[:2] if model.first_dense_layers else (blocks.mixed,)
    short = {"num_layers": len(kinds), "first_dense_layers": len(kinds) - 1}
    for parameter in run_parameters(model.model_copy(update=short), lora).values():
        if parameter.layer == "first":
            yield parameter, int(first or (last and parameter.tied))
        else:
            yield parameter, int(last) if parameter.layer == "last" else kinds[parameter.layer]
