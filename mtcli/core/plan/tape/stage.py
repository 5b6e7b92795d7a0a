"""Counts the live bytes of one micro-batch on a pipeline stage: ends, blocks, and the peaks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from mtcli.core.config.model import MASKED_SHARE
from mtcli.core.plan.tape.autograd import (
    Gradients,
    PendingGradients,
    Storage,
    Tape,
    Value,
    leaf,
    named_again,
    new_gradients,
    same_gradient,
)
from mtcli.core.plan.tape.block import block
from mtcli.core.plan.tape.ops import (
    ENDS,
    HEAD,
    INDEX,
    Gathering,
    Group,
    Kernels,
    TapeContext,
    add,
    concatenated,
    copied,
    dropout,
    enter,
    grid_gemm,
    leave,
    linear,
    marked,
    norm,
    resized,
    reused,
    saved_by,
    then,
    trained,
    vocabulary,
)
from mtcli.core.plan.workload import Workload
from mtcli.kernels.limits import CPU_BLOCK_BYTES, chunk_rows


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
    tape, stream, (first, last) = ctx.tape, ctx.t.stream, ends
    table = vocabulary_table(ctx, first and last)
    if ctx.gathering is not None:
        ctx.gathering.forward(ctx.groups[ENDS])
    x = embedded(ctx, table) if first else _received(ctx, passes_on=not (layers or last))
    start, alone = len(tape.nodes), tape.live - x.size
    x, each, number, others = _through(ctx, x, layers, known)
    end = len(tape.nodes)
    y = head(ctx, x, table) if last else out_of_stage(ctx, x)
    saved, forward_peak, tape.peak = tape.live, tape.peak, tape.live

    given = tape.new(stream * (not last))
    # The pipeline names the given gradient as well.
    pending: PendingGradients = {y.made_by: {y.index: named_again(given)}}
    tape.backward(tape.nodes[end:], pending)
    most, tape.peak = tape.peak, tape.live
    tape.backward(tape.nodes[start:end], pending)
    tape.free(others)
    # Beside what waits there are x and its gradient, the result, and maybe the result's gradient.
    named = stream * (1 + (not first) + (not last)) + given.size * (given.holders == 1)
    half = (tape.live - alone - named) * ctx.work.splits_backward * bool(layers)
    # When the block that is run goes back, the others may have done so, and wait with their halves.
    tape.peak = max(most, tape.peak + max(0.0, number * (half - each)))
    tape.new(number * half)
    tape.backward(tape.nodes[:start], pending)
    if ctx.gathering is not None:
        ctx.gathering.reduced(ctx.groups[ENDS])
    backward_peak, waiting = tape.peak, half * layers
    tape.free(given)
    begun = tape.peak = tape.live
    tape.weights()
    return StageBytes(
        block=each,
        saved=saved,
        waiting=waiting,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        weight_peak=waiting + tape.peak - begun,
        sent=stream * (not first),
    )


def _received(ctx: TapeContext, passes_on: bool) -> Value:
    """Receives a stage's input, which stays alive until its backward is done.

    With `passes_on` x gets a copy of the gradient that is passed on as it came.
    """
    stream = ctx.t.stream
    x = Value(ctx.tape.new(stream))
    return ctx.tape.op([x], [x], new_gradients(stream) if passes_on else same_gradient)[0]


def _through(
    ctx: TapeContext, x: Value, layers: int, known: float
) -> tuple[Value, float, int, Storage]:
    """Runs x through all blocks; the others' saved bytes are added when the first is done.

    Returns (its result, the bytes that a block saves, which are `known` if not 0, how many others
    there are, their bytes).
    """
    tape, run = ctx.tape, min(layers, 1 if ctx.gathering is None else 3)
    each, number, others = known, layers - run, tape.hold(0.0)
    for index in range(run):
        begun, most, named = tape.live, tape.peak, x.storage.holders
        tape.peak = begun
        y = block(ctx, x, index)
        saves_input = x.storage.holders > named  # and not a copy alone
        each = known or tape.live - y.size - begun + x.size * saves_input
        tape.free(x)
        x, before = y, number * each * (index == 0)
        tape.peak = max(most, tape.peak + before)  # the last block's forward has all others' bytes
        others.size += before
        tape.live += before
    return x, each, number, others


def embedded(ctx: TapeContext, weight: Value) -> Value:
    """Runs the embedding, with learned positions and dropout."""
    t = ctx.t
    table = trained(ctx, vocabulary(ctx.work) * t.inner * t.size)  # bytes
    if ctx.work.layout.tp_rows > 1:
        return _with_positions(ctx, _sent_to_rows(ctx, weight, table))
    masked = _looked_up(ctx, weight, table, t.tokens, t.hidden)
    return _with_positions(ctx, then(ctx, masked, leave(ctx, masked)))


def _looked_up(ctx: TapeContext, weight: Value, table: float, tokens: float, width: float) -> Value:
    """Looks up tokens in a vocabulary shard, and zeroes the rows of other shards' tokens; the
    gradient has `table` bytes."""
    size = tokens * width * ctx.t.size
    rows = ctx.tape.op([weight], [size], new_gradients(table), more=tokens * INDEX)[0]
    return then(ctx, rows, ctx.tape.op([rows], [size], new_gradients(size), more=tokens)[0])


def _sent_to_rows(ctx: TapeContext, weight: Value, table: float) -> Value:
    """Looks up every row's tokens on a grid, and sends each row its own."""
    x = _looked_up(ctx, weight, table, ctx.work.tokens, ctx.t.inner)
    for size in (x.size, x.size, x.size, ctx.t.stream):  # two laid out: by columns, and by rank
        x = then(ctx, x, resized(ctx, x, size))
    return x


def _with_positions(ctx: TapeContext, x: Value) -> Value:
    """Adds learned positions and token types, normalises in the order "post", and drops."""
    tape, t, m = ctx.tape, ctx.t, ctx.work.model
    for rows in (m.max_seq_len * (m.position == "learned"), m.token_types):
        if rows:
            table = trained(ctx, rows * t.hidden * t.size)
            row = tape.op([leaf(rows)], [t.stream], new_gradients(table), more=t.rows * INDEX)[0]
            x = then(ctx, row, then(ctx, x, add(ctx, x, row)))
    if m.norm_order == "post":
        x = then(ctx, x, norm(ctx, x))
    if m.dropout:
        x = then(ctx, x, dropout(ctx, x, None))
    return x


def head(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs the last norm, which frees x, and the head with its loss.

    zero=3 reduces the head's gradients as soon as the loss has made them; a tied table's waits for
    the embedding's.
    """
    tape, gathering, m = ctx.tape, ctx.gathering, ctx.work.model
    normed = out_of_stage(ctx, then(ctx, x, norm(ctx, x)) if m.norm_order == "pre" else x)
    if gathering is not None:
        normed = marked(tape, normed, lambda: gathering.reduced(ctx.groups[HEAD]))
    loss = (_loss if m.head == "lm" else _encoder_loss)(ctx, normed, weight)
    tape.free(normed)
    return loss if gathering is None else marked(tape, loss, lambda: tape.waiting.append([]))


def _loss(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs the loss over the vocabulary, of as many tokens as the ctx has."""
    on_grid = ctx.work.layout.tp_rows > 1
    gathered = reused(ctx, x) if on_grid else enter(ctx, x)
    by_torch = ctx.by_torch or on_grid
    loss = (_loss_by_torch if by_torch else _loss_in_chunks)(ctx, gathered, weight)
    return then(ctx, gathered, loss)


def _encoder_loss(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs the loss of masked tokens and of sequences, or of sequences alone."""
    work, tape = ctx.work, ctx.tape
    m, losses = work.model, []
    if m.head == "mlm":
        tokens = replace(ctx, of_head=ceil(MASKED_SHARE * ctx.t.rows))
        picked = _picked(tokens, x, ctx.t.tokens * INDEX)
        normed = then(tokens, picked, _dense(tokens, picked))
        normed = then(tokens, normed, saved_by(tokens, normed, normed.size))  # the activation
        normed = then(tokens, normed, norm(tokens, normed))
        losses.append(then(tokens, normed, _loss(tokens, normed, weight)))
    if m.head != "mlm" or m.sentence_order:
        rows = work.row_sequences * work.sequences
        first = replace(ctx, of_head=rows)
        pooled = _picked(first, x, rows * INDEX)
        pooled = then(first, pooled, _dense(first, pooled))
        pooled = then(
            first,
            pooled,
            tape.op([pooled], [pooled.size], new_gradients(pooled.size), saves_results=[0])[0],
        )
        losses.append(then(first, pooled, saved_by(first, pooled, 0.0)))
    loss = concatenated(ctx, losses, 0.0)
    tape.free(*losses)
    return loss


def _picked(ctx: TapeContext, x: Value, index: float) -> Value:
    """Picks the rows of x that a head takes, by `index` bytes of them."""
    return ctx.tape.op([x], [ctx.t.stream], new_gradients(x.size), more=index)[0]


def _dense(ctx: TapeContext, x: Value) -> Value:
    """Runs a square layer of the head."""
    t = ctx.t
    if ctx.work.layout.tp_rows > 1:
        y = grid_gemm(ctx, x, (t.hidden, t.inner))
        return then(ctx, y, copied(ctx, y, y.size))
    return linear(ctx, x, (t.hidden, t.hidden))


def out_of_stage(ctx: TapeContext, y: Value) -> Value:
    """Ends a stage; zero=3 frees its last gathered weights, and gathers them for backward."""
    gathering = ctx.gathering
    if gathering is None:
        return y
    gathering.settle()
    return marked(ctx.tape, y, lambda: gathering.backward(ctx.groups[ENDS]))


def _loss_in_chunks(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs the fused loss, whose forward makes the gradients, from a chunk of logits at a time."""
    tape, t = ctx.tape, ctx.t
    logits = t.tokens * vocabulary(ctx.work) * t.size
    part = min(t.tokens, chunk_rows(int(logits / t.tokens))) / t.tokens
    several = part < 1
    table = trained(ctx, logits / t.tokens * t.hidden)
    summed = table / t.size * t.wide if several else table
    of_x = tape.new(x.size)
    made = [tape.new(summed)] if several else []
    tape.moment(part * logits + max(part * x.size, 0.0 if several else table))
    tape.free(of_x, *made)
    back = new_gradients(x.size, table)
    return tape.op([x, weight], [0.0], back, more=x.size + summed)[0]


def _loss_by_torch(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs torch's loss: exponentials, and then their gradient, in the logits' memory. Narrow ones
    are made from a wide copy of two blocks' columns, without the vocabulary's padding."""
    tape, t, columns = ctx.tape, ctx.t, vocabulary(ctx.work)
    multiply = grid_gemm if ctx.work.layout.tp_rows > 1 else linear
    logits = multiply(ctx, x, (columns, t.inner), weight=weight)
    valid = min(1.0, ctx.work.model.vocab_size / columns)
    copied = valid * min(logits.size, 2 * CPU_BLOCK_BYTES) / t.size
    copy = 0.0 if t.size >= 4 else copied * t.wide
    more = t.tokens * (INDEX + 1 + 2 * t.wide)
    tape.moment(more + copy)

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        logits.storage.holders += 1
        return [logits.storage]

    loss = tape.op([logits], [0.0], back, saved=[logits], more=more)[0]
    tape.free(logits)
    return loss


def vocabulary_table(ctx: TapeContext, both: bool) -> Value:
    """Builds the vocabulary's table; where both ends share one, its two gradients are summed."""
    weight = leaf(vocabulary(ctx.work))
    if not (both and ctx.work.model.tie_embeddings):
        return weight
    return ctx.tape.op([weight], [0.0], same_gradient)[0]
