"""Counts the live bytes of one micro-batch on a pipeline stage: saved ones, and the peaks."""

from functools import lru_cache
from typing import NamedTuple

from mtcli.core.plan.tape.autograd import (
    PendingGradients,
    Tape,
    Value,
    new_gradients,
    same_gradient,
)
from mtcli.core.plan.tape.block import block
from mtcli.core.plan.tape.context import Kernels, TapeContext
from mtcli.core.plan.tape.ends import embedded, head, vocabulary_table
from mtcli.core.plan.tape.fsdp import ENDS, Gathering, Group, marked
from mtcli.core.plan.tape.ops import norm
from mtcli.core.plan.workload import Workload


class StageBytes(NamedTuple):
    """Live bytes of one micro-batch on a stage: after its F, and peak in F, B and W."""

    block: float  # saved by one block
    saved: float  # alive when F is done
    waiting: float  # alive from I to W, where the backward is split
    forward_peak: float  # until F is done
    backward_peak: float  # from there until B or I is done
    weight_peak: float  # within W
    sent: float  # its input's gradient, alive until the pipeline receives something else
    gathered: float = 0.0  # weights of the ends that zero=3 leaves gathered after F

    @property
    def peaks(self) -> tuple[tuple[float, float], ...]:
        """(bytes of its own that are counted among those alive, peak) within F, B or I, and W."""
        return (
            (self.saved, self.forward_peak),
            (self.saved, self.backward_peak),
            (self.waiting, self.weight_peak),
        )

    def beside(self, size: float) -> "StageBytes":
        """The bytes where `size` more are alive from F to B."""
        return self._replace(
            saved=self.saved + size,
            forward_peak=self.forward_peak + size,
            backward_peak=self.backward_peak + size,
        )


@lru_cache(maxsize=4096)
def stage_bytes(
    work: Workload,
    kernels: Kernels,
    ends: tuple[bool, bool],
    layers: int,
    groups: tuple[Group, ...] = (),
) -> StageBytes:
    """Live bytes of a stage of so many layers; `ends` say whether it is the first and the last one.

    All blocks are alike: the last is run (with zero=3, which gathers `groups`, the last three), the
    others' bytes are alive from the forward on until the backward reaches the embedding.
    """
    owners = work.layout.dp * work.layout.cp if work.zero == 1 else 1
    plain = _run(TapeContext(Tape(owners, work.splits_backward), work, kernels), ends, layers)
    if not groups:
        return plain
    tape = Tape()
    ctx = TapeContext(tape, work, kernels, Gathering(tape), groups)
    sharded = _run(ctx, ends, layers, plain.block)
    return plain._replace(
        forward_peak=sharded.forward_peak,
        backward_peak=sharded.backward_peak,
        gathered=groups[ENDS].weights,
    )


def _run(ctx: TapeContext, ends: tuple[bool, bool], layers: int, known: float = 0.0) -> StageBytes:
    """Runs a stage forward and back. A block saves `known` bytes, or if 0 what it is seen to."""
    tape, stream, (first, last) = ctx.tape, ctx.t.stream, ends
    table = vocabulary_table(ctx, first and last)
    if ctx.gathering is not None:
        ctx.gathering.forward(ctx.groups[ENDS])
    received = Value(tape.new(stream * (not first)))  # alive until its backward is done
    if first:
        x = embedded(ctx, table)
    else:  # x gets a copy of a gradient that is passed on as it came
        back = new_gradients(stream) if not (layers or last) else same_gradient
        x = tape.op([received], [received], back)[0]
    start, alone = len(tape.nodes), tape.live - x.size
    run, each = min(layers, 1 if ctx.gathering is None else 3), known
    number, others = layers - run, tape.new(0.0)
    for index in range(run):
        most, tape.peak = tape.peak, tape.live
        x, saved_bytes = _block_and_bytes(ctx, x, index)
        each = known or saved_bytes
        before = number * each * (index == 0)
        tape.peak = max(most, tape.peak + before)  # the last block's forward has all others' bytes
        others = others if index else tape.new(before)
    end = len(tape.nodes)
    if last and ctx.work.model.norm_order == "pre":
        x = norm(ctx, x)
    x = _out_of_stage(ctx, x)
    if last:
        x = head(ctx, x, table)
    saved, forward_peak, tape.peak = tape.live, tape.peak, tape.live

    given = tape.new(stream * (not last))  # the pipeline names it as well
    pending: PendingGradients = {x.edge.node: {x.edge.result: given}}
    tape.backward(tape.nodes[end:], pending)
    most, tape.peak = tape.peak, tape.live
    tape.backward(tape.nodes[start:end], pending)
    del others
    # Beside what waits there are x and its gradient, the result, and maybe the result's gradient.
    waits = any(given in weight_pass.needs for weight_pass in tape.weight_passes)
    named = stream * (1 + (not first) + (not last)) + given.size * (not waits)
    half = tape.live - alone - named if ctx.work.splits_backward and layers else 0.0
    # When the block that is run goes back, the others may have done so, and wait with their halves.
    tape.peak = max(most, tape.peak + max(0.0, number * (half - each)))
    halves = tape.new(number * half)
    tape.backward(tape.nodes[:start], pending)
    if ctx.gathering is not None:
        ctx.gathering.reduced(ctx.groups[ENDS])
    backward_peak, waiting = tape.peak, half * layers
    del given
    begun = tape.peak = tape.live
    tape.weights()
    weight_peak = waiting + tape.peak - begun
    del halves
    return StageBytes(
        block=each,
        saved=saved,
        waiting=waiting,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        weight_peak=weight_peak,
        sent=stream * (not first),
    )


def _block_and_bytes(ctx: TapeContext, x: Value, index: int) -> tuple[Value, float]:
    """Runs a block: (its result, the bytes that it saves for backward)."""
    tape, live, start = ctx.tape, ctx.tape.live, len(ctx.tape.nodes)
    y = block(ctx, x, index)
    saves_input = any(x.storage in node.saved for node in tape.nodes[start:])
    return y, tape.live - y.size - live + x.size * saves_input


def _out_of_stage(ctx: TapeContext, y: Value) -> Value:
    """Ends a stage; zero=3 frees its last gathered weights, and gathers them for backward."""
    gathering = ctx.gathering
    if gathering is None:
        return y
    gathering.settle()
    return marked(ctx.tape, y, lambda: gathering.backward(ctx.groups[ENDS]))
