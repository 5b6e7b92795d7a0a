"""Searches for the best layouts of a model on some devices, and the fewest devices that hold it.

Memory is estimated by closed forms. A caller may rehearse the layouts that the search finds: their
real stages then decide whether they fit.

A lower bound of a step's seconds, its busiest rank's work plus the pipeline's fill, is quick to
compute. A priority queue orders layouts by a loose bound first, then by a tight one; layouts at its
head that fit are simulated. Once the bound at the head exceeds the best simulated step of the K-th
kind of layout no other kind can be better, so the result is exact. A layout whose bound exceeds the
best of its kind waits, for the case that this one's real stages do not fit.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import gcd
from typing import Any, NamedTuple

from mtcli.core.config.fields import MAX_RANKS, divisors
from mtcli.core.config.layout_rules import uneven_heads
from mtcli.core.config.rules import problems
from mtcli.core.config.schema import ParallelConfig, RunConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.memory import fits, smallest
from mtcli.core.plan.predict import Prediction, predict_workload
from mtcli.core.plan.step_time import block_costs, stage_seconds, step_costs, weight_seconds
from mtcli.core.plan.workload import Workload

AxisSizes = dict[str, Any]
Kind = tuple[int, ...]
Bound = tuple[float, int, bool]  # seconds, number of a layout, whether the bound is tight

AXES = ("tp", "cp", "pp", "vpp", "ep", "etp")
OTHERS = ("micro_batch_size", "schedule", "zero", "recompute")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_TRIED = 64  # counts of devices between one that does not fit and its double, which does
SMALLEST_CONTEXT = 4096  # tokens of a sequence per cp rank; with fewer the ring cannot hide


class Candidate(NamedTuple):
    """A legal layout that fits, as a config for `train`, and its predicted cost."""

    config: RunConfig
    prediction: Prediction


# Gives predictions the bytes of their configs' real stages.
Rehearse = Callable[[Sequence[tuple[RunConfig, Prediction]]], list[Prediction]]


def as_estimated(plans: Sequence[tuple[RunConfig, Prediction]]) -> list[Prediction]:
    """Returns the predictions unchanged."""
    return [prediction for _, prediction in plans]


@dataclass(frozen=True)
class SearchResult:
    """The best candidates, best first, and counts of the other layouts."""

    best: tuple[Candidate, ...]
    tried: int
    too_large: int
    nearest: Workload | None  # of the layouts that are too large, the one that needs least memory
    works: tuple[Workload, ...] = ()  # everything that was tried, and squares of ranks

    @property
    def by_kind(self) -> bool:
        """Whether the candidates are the best of a kind each."""
        return len(set(map(kind_of, self.works))) > 1


def search(
    config: RunConfig,
    world: int,
    device: Device,
    top: int,
    pinned: frozenset[str] = frozenset(),
    rehearse: Rehearse = as_estimated,
) -> SearchResult:
    """The fastest layouts of a model on `world` devices that fit their memory: one of each of the
    `top` best kinds, or the `top` best where all are of one kind.

    Fields named in `pinned` ("parallel.tp", "batch.micro_batch_size") keep the config's value.
    `rehearse` gets the layouts that the search finds; while one of them then does not fit, the
    search continues for another.
    """
    works = works_of(config, world, device, pinned)
    kinds = [kind_of(work) for work in works]
    if len(set(kinds)) < 2:
        kinds = [(number,) for number in range(len(works))]
    frontier = _Frontier(config, world, device, works, kinds)
    while True:
        leading = frontier.explore(top)
        plans = [frontier.found[kind][0] for kind in leading]
        best = [Candidate(c, p) for (c, _), p in zip(plans, rehearse(plans), strict=True)]
        too_large = [k for k, one in zip(leading, best, strict=True) if not one.prediction.fits]
        if not too_large:
            break
        for kind in too_large:
            frontier.drop(kind)
    nearest = smallest(frontier.large, device) if frontier.large and not best else None
    return SearchResult(tuple(best), len(works), len(frontier.large), nearest, tuple(works))


def kind_of(work: Workload) -> Kind:
    """What a plan shows one layout of: those of equal axes and sharding, which differ in chunks,
    schedule, micro-batch or recomputation."""
    layout = work.layout
    return (layout.tp, layout.tp_rows, layout.cp, layout.pp, layout.ep, work.zero)


class _Frontier:
    """The layouts that a search has yet to look at, and the candidates that it has found."""

    def __init__(
        self,
        config: RunConfig,
        world: int,
        device: Device,
        works: Sequence[Workload],
        kinds: Sequence[Kind],
    ) -> None:
        self.config, self.world, self.device = config, world, device
        self.works, self.kinds = works, kinds
        self.queue: list[Bound] = [(_loose_bound(w, device), n, False) for n, w in enumerate(works)]
        heapify(self.queue)
        self.found: dict[Kind, list[Candidate]] = {}  # of each kind, the fastest first
        self.slower: dict[Kind, list[Bound]] = {}  # than the fastest of their kind
        self.large: list[Workload] = []

    def explore(self, top: int) -> list[Kind]:
        """Returns the `top` best kinds, once no layout in the queue can be of them."""
        while True:
            leading = sorted((kind for kind in self.found if self.found[kind]), key=self.seconds)
            full = len(leading) >= top
            if not self.queue or (full and self.queue[0][0] > self.seconds(leading[top - 1])):
                return leading[:top]
            self._look(heappop(self.queue))

    def seconds(self, kind: Kind) -> float:
        """The seconds of a step of the fastest candidate of a kind."""
        return _seconds(self.found[kind][0])

    def _look(self, head: Bound) -> None:
        bound, number, is_tight = head
        work, kind = self.works[number], self.kinds[number]
        if self.found.get(kind) and self.seconds(kind) <= bound:
            self.slower.setdefault(kind, []).append(head)
        elif not is_tight:
            heappush(self.queue, (lower_bound(work, self.device), number, True))
        elif not fits(work, self.device):
            self.large.append(work)
        elif not problems(chosen := apply(self.config, work), self.world):
            candidate = Candidate(chosen, predict_workload(work, self.device))
            insort(self.found.setdefault(kind, []), candidate, key=_seconds)

    def drop(self, kind: Kind) -> None:
        """Drops the fastest candidate of a kind, which does not fit after all."""
        self.large.append(self.found[kind].pop(0).prediction.work)
        for bound in self.slower.pop(kind, []):
            heappush(self.queue, bound)


def _seconds(candidate: Candidate) -> float:
    return candidate.prediction.step_seconds


def fewest(
    config: RunConfig,
    above: int,
    device: Device,
    pinned: frozenset[str],
    keeps_batch: bool,
    rehearse: Rehearse = as_estimated,
) -> Candidate | None:
    """The fastest layout on the fewest devices, more than `above`, that hold the model.

    Counts beyond the first node are whole nodes. A preset's batch is rounded where no layout
    divides it. None where no count is enough, and on a CPU, whose ranks share one memory.
    """

    def sized(world: int) -> RunConfig | None:
        """The config on `world` devices, if a layout fits."""
        batch = config.batch.global_batch_size
        for size in [batch] if keeps_batch else [batch, round_batch(batch, world)]:
            resized = with_batch(config, size)
            if works := works_of(resized, world, device, pinned):
                return resized if any(fits(work, device) for work in works) else None
        return None

    if device.name == "cpu":
        return None
    low = above
    powers = (2**n for n in range(above.bit_length(), MAX_RANKS.bit_length()))
    for high in powers:
        if sized(high):
            break
        low = high
    else:
        return None
    for world in _between(low, high, device.node_size):
        resized = sized(world)
        if resized and (found := search(resized, world, device, 1, pinned, rehearse).best):
            return found[0]
    return None


def _between(low: int, high: int, node: int) -> Iterator[int]:
    """Yields counts above `low`, up to `high`: all within a node, and whole nodes beyond."""
    yield from range(low + 1, min(node, high) + 1)
    nodes = range(max(low, node) // node + 1, high // node + 1)
    yield from (count * node for count in nodes[:: max(1, len(nodes) // MOST_TRIED)])
    yield high


def round_batch(sequences: int, gpus: int) -> int:
    """Rounds a number of sequences to one that many layouts' data ranks divide: a multiple of the
    world's odd part and of its powers of two up to 64."""
    odd = gpus // (gpus & -gpus)
    unit = odd * min(64, gpus & -gpus)
    return max(1, -(-sequences // unit)) * unit


def with_batch(config: RunConfig, sequences: int) -> RunConfig:
    """The config with `sequences` as its global batch."""
    batch = config.batch.model_copy(update={"global_batch_size": sequences})
    return config.model_copy(update={"batch": batch})


def works_of(
    config: RunConfig, world: int, device: Device, pinned: frozenset[str]
) -> list[Workload]:
    """Every workload to try: those in one dimension, unless the config asks for two, and grids."""
    one = [] if config.parallel.tp_mode == "2d" else legal_works(config, world, pinned)
    return [*one, *grids(config, world, device, pinned)]


def grids(config: RunConfig, world: int, device: Device, pinned: frozenset[str]) -> list[Workload]:
    """Workloads in two dimensions. A config in one dimension that does not pin tp_mode gets
    squares. One in two dimensions gets grids of its pinned `tp_rows`, or else those within a node
    or with a node per row; beyond that a square sends less."""
    p, m = config.parallel, config.model
    asked, given = p.tp_mode == "2d", "parallel.tp_rows" in pinned
    if not asked and ("parallel.tp_mode" in pinned or m.num_experts or m.mla):
        return []
    fixed = "batch.micro_batch_size" in pinned
    sizes = [config.batch.micro_batch_size] if fixed else MICRO_BATCHES
    rows = {row for size in sizes for row in divisors(size) if m.hidden_size % row == 0} - {1}
    works = []
    for count in sorted(rows) if asked and not given else [p.tp_rows if asked else 0]:
        shape = p.model_copy(update={"tp_mode": "2d", "tp_rows": count})
        works += legal_works(config.model_copy(update={"parallel": shape}), world, pinned)
    return [
        work
        for work in works
        if work.layout.cp == 1
        and work.micro_batch_size % work.layout.tp_rows == 0
        and (
            given
            or work.columns in (work.layout.tp_rows, device.node_size)
            or work.layout.tp <= device.node_size
        )
    ]


def apply(config: RunConfig, work: Workload) -> RunConfig:
    """The config with a workload's layout and micro-batch."""
    layout = work.layout
    axes = {axis: layout.size(axis) for axis in ("cp", "pp", "ep", "etp")}
    mode = work.tp_mode if layout.tp_rows > 1 else config.parallel.tp_mode
    with_tp = config.parallel.model_copy(update={"tp": layout.tp, "tp_mode": mode})
    even = config.model.num_layers % layout.num_stages == 0
    parallel = {
        **axes,
        "tp": layout.tp,
        "tp_mode": mode,
        "tp_rows": with_tp.tp_rows if with_tp.grid_rows == layout.tp_rows else layout.tp_rows,
        "vpp": layout.vpp,
        "schedule": work.schedule_name,
        "zero": work.zero,
        "recompute": work.recompute,
        "sequence_parallel": work.sequence_parallel,
        "stage_layers": () if even else work.layers_of_stage,
    }
    batch = config.batch.model_copy(update={"micro_batch_size": work.micro_batch_size})
    chosen = config.parallel.model_copy(update=parallel)
    return config.model_copy(update={"parallel": chosen, "batch": batch})


def choices(
    config: RunConfig, world: int, pinned: frozenset[str] = frozenset()
) -> Iterator[AxisSizes]:
    """Yields every layout worth trying.

    Omits what another choice beats in time and in memory: gpipe (by 1f1b), zero=0 (by zero=1
    where dp > 1), selective recompute under flash attention (by none), and no sequence parallelism
    where tp divides a micro-batch's tokens; also cp ranks of fewer than SMALLEST_CONTEXT tokens.
    """
    m, b = config.model, config.batch

    def options(field: str, values: list[Any]) -> list[Any]:
        section, name = field.split(".")
        return [getattr(getattr(config, section), name)] if field in pinned else values

    cps = [
        c for c in divisors(b.seq_len) if c & (c - 1) == 0 and b.seq_len // c >= SMALLEST_CONTEXT
    ]
    eps = options("parallel.ep", divisors(m.num_experts) if m.num_experts else [1])
    widths = divisors(m.moe_ffn_hidden_size) if m.num_experts else [1]
    sizes = options("batch.micro_batch_size", list(MICRO_BATCHES))
    again = options("parallel.recompute", ["none", "full"])
    for tp, cp, pp, vpp in _grids(config, world, cps or [1], options):
        dp = world // (tp * cp * pp)
        etps = options("parallel.etp", [etp for etp in widths if etp <= tp])
        experts = [(ep, etp) for ep, etp in product(eps, etps) if world % (ep * etp * pp) == 0]
        plain = ["1f1b", "zero_bubble"] if pp > 1 else ["1f1b"]
        schedules = options("parallel.schedule", ["interleaved"] if vpp > 1 else plain)
        sharded = [1, 3] if pp == 1 else [1]
        if config.sync.method != "all_reduce":  # a replica may have one data rank
            sharded = [0, 1]
        zeros = options("parallel.zero", [0] if dp == 1 else sharded)
        fitting = [size for size in sizes if b.global_batch_size % (size * dp) == 0]
        for (ep, etp), *other_values in product(experts, fitting, schedules, zeros, again):
            chosen = (tp, cp, pp, vpp, ep, etp, *other_values)
            yield dict(zip((*AXES, *OTHERS), chosen, strict=True))


def _grids(
    config: RunConfig, world: int, cps: list[int], options: Callable[[str, list[Any]], list[Any]]
) -> Iterator[tuple[int, int, int, int]]:
    """Yields (tp, cp, pp, vpp) that divide the model and the world."""
    m = config.model
    width = m.dense_ffn_hidden_size
    tps = divisors(gcd(m.num_heads, width))  # gcd(heads, 0) is heads
    if config.parallel.tp_mode == "2d":
        sides = divisors(gcd(m.hidden_size, m.num_kv_heads, tps[-1]))
        rows = config.parallel.tp_rows
        tps = [side * (rows or side) for side in sides if side > 1 or rows]
    else:
        tps = [tp for tp in tps if not uneven_heads(m, tp)]
    for tp, cp in product(options("parallel.tp", tps), options("parallel.cp", cps)):
        if world % (tp * cp):
            continue
        pps = [pp for pp in divisors(world // (tp * cp)) if pp <= m.num_layers]
        for pp in options("parallel.pp", pps):
            if world % (tp * cp * pp) == 0:
                for vpp in options("parallel.vpp", _chunks(m.num_layers, pp)):
                    yield tp, cp, pp, vpp


def _chunks(num_layers: int, pp: int) -> list[int]:
    """Chunks per rank: all that divide the layers evenly; powers of two where pp does not."""
    if pp == 1:
        return [1]
    if num_layers % pp == 0:
        return divisors(num_layers // pp)
    return [vpp for vpp in (1, 2, 4, 8, 16) if pp * vpp <= num_layers]


def legal_works(config: RunConfig, world: int, pinned: frozenset[str]) -> list[Workload]:
    """The workload of every choice that the pinned values allow."""
    start = Workload.of(config, world)
    parallel = config.parallel
    works = [_with(start, choice, parallel) for choice in choices(config, world, pinned)]
    return [work for work in works if not (pinned and problems(apply(config, work), world))]


def _loose_bound(work: Workload, device: Device) -> float:
    """Seconds of the blocks of the rank with most layers, quicker to compute than `lower_bound`."""
    block = block_costs(work, device).block
    layers = -(-work.model.num_layers // work.layout.pp)
    return work.num_micro_batches * layers * block.total


def lower_bound(work: Workload, device: Device) -> float:
    """A lower bound of the simulated step's seconds.

    A rank starts once a micro-batch has passed the first stages of the ranks ahead of it, does its
    work, and its last gradient returns through them. Under zero_bubble rank r may delay r weight
    passes beyond that; rank 0 ends with one.
    """
    costs = step_costs(work, device)
    stages, pp, m = stage_seconds(work, costs), work.layout.pp, work.num_micro_batches
    weights = weight_seconds(work, costs) if work.splits_backward else [0.0] * len(stages)
    bound, around = 0.0, weights[0]
    for rank in range(pp):
        busy = m * sum(stage.total for stage in stages[rank::pp])
        bound = max(bound, around + busy - min(m, rank + 1) * weights[rank])
        around += stages[rank].total - weights[rank] + 2 * costs.hop
    return bound / costs.crowd + costs.gradients_exposed + costs.optimizer + costs.overhead


def _with(work: Workload, choice: AxisSizes, parallel: ParallelConfig) -> Workload:
    """`Workload.of(apply(config, choice), world)`, computed without building the config."""
    axes = {axis: choice[axis] for axis in AXES}
    sizes = parallel.model_copy(update=axes)
    replicas = work.sync.num_replicas(sizes.most_replicas(work.layout.world))
    tokens = choice["micro_batch_size"] * work.seq_len // choice["cp"]
    rows = sizes.grid_rows
    divides = rows > 1 or tokens % choice["tp"] == 0
    return replace(
        work,
        layout=ParallelLayout(work.layout.world, **axes, replicas=replicas, tp_rows=rows),
        sequence_parallel=work.sequence_parallel and divides,
        micro_batch_size=choice["micro_batch_size"],
        schedule_name=choice["schedule"],
        zero=choice["zero"],
        recompute=choice["recompute"],
        stage_sizes=(),
    )
