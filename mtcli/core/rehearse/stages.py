"""Measures the live bytes of a rank's step, by running its real stages on fake tensors.

One micro-batch goes forward and back through the rank's real trainer. Live bytes are noted at the
end of every block, and only a few blocks run: the trace of the middle one is repeated for as many
as the stage has. Of chunks of one kind one runs, in a pipeline of at most three ranks.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from mtcli.core.config.schema import RunConfig
from mtcli.core.model.block import Residual
from mtcli.core.model.build import activation_format
from mtcli.core.model.transformer import Stage
from mtcli.core.parallel.pipeline import Pipeline
from mtcli.core.plan.activations import gathered_bytes
from mtcli.core.plan.elements import rank_elements
from mtcli.core.plan.rank_bytes import RankBytes, StageBytes
from mtcli.core.plan.search import with_batch
from mtcli.core.plan.workload import Workload
from mtcli.core.rehearse.fake_world import fake_trainer
from mtcli.core.rehearse.live_memory import LiveMemory
from mtcli.core.rehearse.request import Rehearsal, StageKind, kind_of
from mtcli.core.schedule.ops import Op, OpKind, Schedule
from mtcli.core.training.loader import synthetic_loader
from mtcli.kernels.multi_tensor import CHUNK

# Blocks of a stage that run; with zero = 3 a block gathers the weights of the next one.
BLOCKS, SHARDED_BLOCKS = 3, 4
CHUNK_ROW = 16  # bytes of a row of kernels.multi_tensor's chunks, which stay from step to step


class Mark(NamedTuple):
    """Live bytes at a place of the trace (`level`), and their peak since the previous mark."""

    place: tuple[str, int, int]  # op kind, stage, block; block -1 is the op's end
    peak: int
    level: int


class Trace:
    """Records the live bytes of a step besides the state, as marks."""

    def __init__(self, live: LiveMemory, state: int) -> None:
        self.live, self.state = live, state
        self.marks: list[Mark] = []

    def mark(self, kind: str, stage: int, block: int = -1) -> None:
        """Adds a mark, which ends a part of the trace."""
        live = self.live
        self.marks.append(
            Mark((kind, stage, block), live.peak - self.state, live.bytes - self.state)
        )
        live.begin()

    def watch(self, number: int, stage: Stage) -> None:
        """Marks the end of each block's forward, and the beginning of its backward."""
        for block, module in enumerate(stage.blocks.values()):

            def note(_: nn.Module, __: object, after: Residual, block: int = block) -> None:
                self.mark("F", number, block)
                if after.x_TD.requires_grad:
                    after.x_TD.register_hook(lambda _: self.mark("B", number, block))

            module.register_forward_hook(note)

    @contextmanager
    def around(self, op: Op) -> Iterator[None]:
        """Marks the begin and the end of an op."""
        self.mark("between", op.stage)
        yield
        self.mark(op.kind, op.stage)


def rehearse(rehearsal: Rehearsal) -> RankBytes:
    """Runs a step of a pipeline rank; returns its bytes besides the state."""
    work, pp_rank = Workload.of(rehearsal.config, rehearsal.world), rehearsal.pp_rank
    casts = _casts_gradients(work, rehearsal.on_cpu)
    passes = 2 if work.zero == 3 or work.layout.tp_rows > 1 or casts else 1
    config, world, at, *device = _short(rehearsal, work, passes)
    short = Workload.of(config, world)
    numbers = _chosen(work, pp_rank) if work.freeze else list(short.layout.stages(at))
    with fake_trainer(config, world, short.layout.attention.rank(pp=at), *device) as step:
        trainer, live = step
        schedule = _schedule(short, at, numbers, passes)
        form = activation_format(config)
        trainer.pipeline = Pipeline(trainer.stages, schedule, trainer.groups, form)
        trace = Trace(live, trainer.state_bytes())
        trainer.pipeline.around = trace.around
        for number in numbers:
            trace.watch(number, trainer.stages[number])
        with closing(synthetic_loader(config, trainer.groups)) as loader:
            trainer.train_step(loader)
        trainer.strategy.settle()  # as the next forward does, ahead of any peak
        trace.mark("update", -1)
    more = gathered_bytes(work, pp_rank) - gathered_bytes(short, at)
    found = _rank_bytes(work, trace.marks, pp_rank, numbers, more, casts)
    chunks = (_updated(work, pp_rank) - _updated(short, at)) / CHUNK
    return found._replace(standing=found.standing + chunks * CHUNK_ROW * (not rehearsal.on_cpu))


def _updated(work: Workload, pp_rank: int) -> int:
    """Elements that a rank's optimizer updates."""
    elements = rank_elements(work, pp_rank)
    return elements.shard if work.zero else elements.total


def _casts_gradients(work: Workload, on_cpu: bool) -> bool:
    """Whether a second micro-batch takes more: a CPU casts a gradient to add it to a wider one."""
    adds = work.zero < 3 and work.num_micro_batches > 1  # to buckets
    return on_cpu and adds and work.sizes.gradient > work.sizes.weight


def _short(rehearsal: Rehearsal, work: Workload, passes: int) -> Rehearsal:
    """Shortens a run to `passes` micro-batches and a few blocks, in a pipeline of a first, a last
    and one more rank; the rehearsed one has a stage of each kind."""
    config, layout, pp_rank = rehearsal.config, work.layout, rehearsal.pp_rank
    config = with_batch(config, passes * work.micro_batch_size * layout.batch_shards)
    if work.freeze:  # no block stands for others
        return rehearsal._replace(config=config)
    counts, most = [], SHARDED_BLOCKS if work.zero == 3 else BLOCKS
    for stage in _chosen(work, pp_rank):
        dense, mixed, _ = work.block_counts([stage])
        # The middle block, which is repeated, has experts.
        counts.append((dense, min(mixed, most + dense)) if mixed else (min(dense, most), 0))
    pp, vpp = min(layout.pp, 3), len(counts)
    at = pp - 1 if pp_rank == layout.pp - 1 else min(pp_rank, 1)
    layers = [0] * (pp * vpp)
    layers[at::pp] = map(sum, counts)
    sizes = {"num_layers": sum(layers), "first_dense_layers": sum(dense for dense, _ in counts)}
    axes = {"pp": pp, "vpp": vpp, "stage_layers": tuple(layers)}
    model = config.model.model_copy(update=sizes)
    parallel = config.parallel.model_copy(update=axes)
    config = config.model_copy(update={"model": model, "parallel": parallel})
    return rehearsal._replace(config=config, world=layout.world // layout.pp * pp, pp_rank=at)


def serve() -> None:
    """Reads a Rehearsal from each line of stdin, and answers with a line of JSON."""
    for line in sys.stdin:
        config, *fields = json.loads(line)
        found = rehearse(Rehearsal(RunConfig(**config), *fields))
        sys.stdout.write(json.dumps(found._asdict()) + "\n")
        sys.stdout.flush()


def _chosen(work: Workload, pp_rank: int) -> list[int]:
    """The stages of a rank that run: the first, which makes what others share, and one of each
    further kind."""
    kinds: dict[StageKind, int] = {}
    for stage in work.layout.stages(pp_rank):
        kinds.setdefault(kind_of(work, pp_rank, stage), stage)
    return list(kinds.values())


def _schedule(work: Workload, pp_rank: int, chosen: Sequence[int], passes: int) -> Schedule:
    """The schedule in which a rank runs all micro-batches forward through the chosen stages, then
    back; the ops of other ranks send its inputs and receive its outputs."""
    layout = work.layout
    back: tuple[OpKind, ...] = ("I", "W") if work.splits_backward else ("B",)
    places = [(number, stage) for number in range(passes) for stage in chosen]
    returns = [(number, stage) for number in range(passes) for stage in reversed(chosen)]
    ops = [Op("F", *place) for place in places]
    ops += [Op(kind, *place) for place in returns for kind in back]
    steps: tuple[tuple[OpKind, int], ...] = (("F", -1), (back[0], 1), ("F", 1), (back[0], -1))
    peer_ops: list[dict[Op, None]] = [{} for _ in range(layout.pp)]
    for kind, step in steps:
        for number, stage in places:
            if 0 <= stage + step < layout.num_stages:
                peer_ops[(stage + step) % layout.pp][Op(kind, number, stage + step)] = None
    everywhere = [
        tuple(ops) if rank == pp_rank else tuple(them) for rank, them in enumerate(peer_ops)
    ]
    return Schedule(tuple(everywhere), tuple(s % layout.pp for s in range(layout.num_stages)))


class TracePart(NamedTuple):
    """Bytes of a part of an op, relative to the bytes that are alive when the part begins."""

    peak: int
    change: int  # at its end


Parts = Sequence[TracePart]


def _rank_bytes(
    work: Workload,
    marks: Sequence[Mark],
    pp_rank: int,
    numbers: Sequence[int],
    more: float,
    casts: bool,
) -> RankBytes:
    """Computes a rank's bytes from the trace of the stages `numbers`; the update gathers `more`
    than the short model's."""
    ops, runs, passed_on = _ops(marks), {}, 0
    for stage, number in reversed([*zip(_chosen(work, pp_rank), numbers, strict=True)]):
        layers = work.layers_of_stage[stage]
        forwards, backwards = ops["F", number], ops["IB"[not work.splits_backward], number]
        saved, forward_peak = _sums(_longer(forwards[-1], layers))
        if work.zero == 3:  # the first forward gathers the ends, which the next one finds
            forward_peak = _sums(_longer(forwards[0], layers))[1]
        change, peak = _sums(_longer(backwards[-1], layers))
        finds_ends = work.zero == 3 and work.layout.vpp == 1  # gathered by the forward before it
        if finds_ends or (casts and _forwards_come_first(work, pp_rank)):
            # The first backward frees those ends, and makes what stays from step to step. The one
            # after it has one less alive.
            first_change, first_peak = _sums(_longer(backwards[0], layers))
            peak = max(first_peak + change - first_change, peak - saved)
        waiting = sent = weight_peak = 0
        if work.splits_backward:
            of_weights, weight_peak = _sums(ops["W", number][-1])
            sent = _sums(forwards[-1])[0] + _sums(backwards[-1])[0] + of_weights
            waiting = saved + change - sent
        runs[kind_of(work, pp_rank, stage)] = StageBytes(
            saved=saved,
            waiting=waiting,
            forward_peak=forward_peak,
            backward_peak=saved + peak + passed_on,
            weight_peak=waiting + weight_peak,
            sent=sent,
            gathered=(_sums(forwards[0])[0] - _sums(forwards[-1])[0]) * (work.zero == 3),
        )
        if work.layout.pp == 1:  # the gradient of its input, which no other rank receives
            passed_on += saved + change
    kinds = [kind_of(work, pp_rank, stage) for stage in work.layout.stages(pp_rank)]
    update, previous = marks[-1], marks[-2]
    return RankBytes(
        [runs[kind] for kind in kinds], update.peak - previous.level + more, update.level
    )


def _forwards_come_first(work: Workload, pp_rank: int) -> bool:
    """Whether all forwards of a step precede its first backward."""
    layout, count = work.layout, work.num_micro_batches
    gathers = work.schedule_name == "gpipe" and layout.pp > 1
    return layout.vpp == 1 and (gathers or count <= layout.pp - pp_rank)


def _ops(marks: Sequence[Mark]) -> dict[tuple[str, int], list[Parts]]:
    """The parts of each op of a kind and stage, in the order in which they ran."""
    ops: dict[tuple[str, int], list[Parts]] = {}
    parts: list[TracePart] = []
    for previous, mark in pairwise(marks):
        kind, stage, block = mark.place
        if kind == "between":
            continue
        parts.append(TracePart(mark.peak - previous.level, mark.level - previous.level))
        if block < 0:
            ops.setdefault((kind, stage), []).append(parts)
            parts = []
    return ops


def _longer(parts: Parts, layers: int) -> Parts:
    """Repeats the middle part of an op, for a stage of `layers` blocks of which a few ran."""
    blocks = len(parts) - 1
    if blocks >= layers:
        return parts
    middle = (blocks + 1) // 2
    return [*parts[:middle], *[parts[middle]] * (layers - blocks), *parts[middle:]]


def _sums(parts: Parts) -> tuple[int, int]:
    """(the sum of changes, the peak) over the parts of an op."""
    level = peak = 0
    for part in parts:
        peak = max(peak, level + part.peak)
        level += part.change
    return level, peak
