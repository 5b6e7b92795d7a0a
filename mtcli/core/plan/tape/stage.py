"""Counts the live bytes of one micro-batch on a pipeline stage: ends, blocks, and the peaks."""

from collections.abc import Callable, Sequence
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
    dropout,
    enter,
    grid_gemm,
    leave,
    linear,
    norm,
    resized,
    reused,
    saved_by,
    shifted,
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
    x, blocks = _through(ctx, x, layers, known)
    end = len(tape.nodes)
    y = head(ctx, x, table) if last else out_of_stage(ctx, x)
    saved, forward_peak, tape.peak = tape.live, tape.peak, tape.live

    given = tape.new(stream * (not last))
    # The pipeline names the given gradient as well.
    pending: PendingGradients = {y.made_by: {y.index: named_again(given)}}
    tape.backward(tape.nodes[end:], pending)
    most, tape.peak = tape.peak, tape.live
    tape.backward(tape.nodes[start:end], pending)
    tape.free(blocks.others)
    # Beside what waits there are x and its gradient, the result, and maybe the result's gradient.
    named = stream * (1 + (not first) + (not last)) + given.size * (given.holders == 1)
    half = (tape.live - alone - named) * ctx.work.splits_backward * bool(layers)
    # When the block that is run goes back, the others may have done so, and wait with their halves.
    tape.peak = max(most, tape.peak + max(0.0, blocks.number * (half - blocks.each)))
    tape.new(blocks.number * half)
    tape.backward(tape.nodes[:start], pending)
    if ctx.gathering is not None:
        rest = ctx.groups[ENDS]
        ctx.gathering.reduced(rest, rest.wide, rest.last)
    backward_peak, waiting = tape.peak, half * layers
    tape.free(given)
    begun = tape.peak = tape.live
    tape.weights()
    return StageBytes(
        block=blocks.each,
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
    tape, stream = ctx.tape, ctx.t.stream
    x = Value(tape.new(stream))

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(stream) if passes_on else named_again(grads[0])]

    return tape.op([x], [x], back)[0]


class _Blocks(NamedTuple):
    """The blocks of a stage that are not run one by one."""

    each: float  # saved by one
    number: int
    others: Storage  # saved by all of them


def _through(ctx: TapeContext, x: Value, layers: int, known: float) -> tuple[Value, _Blocks]:
    """Runs x through all blocks; the others' saved bytes are added when the first is done.

    `known` are the bytes that each saves, if not 0.
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
    return x, _Blocks(each, number, others)


def embedded(ctx: TapeContext, weight: Value) -> Value:
    """Runs the embedding, with learned positions and dropout."""
    tape, t = ctx.tape, ctx.t
    table = trained(ctx, _table_bytes(ctx))
    if ctx.work.layout.tp_rows > 1:
        return _with_positions(ctx, _sent_to_rows(ctx, weight, table))
    size = t.tokens * t.hidden * t.size
    rows = tape.op([weight], [size], new_gradients(table), more=t.tokens * INDEX)[0]
    masked = tape.op([rows], [size], new_gradients(size), more=t.tokens)[0]
    tape.free(rows)
    return _with_positions(ctx, then(ctx, masked, leave(ctx, masked)))


def _sent_to_rows(ctx: TapeContext, weight: Value, table: float) -> Value:
    """Looks up every row's tokens on a grid, and sends each row its own."""
    tape, t, tokens = ctx.tape, ctx.t, ctx.work.tokens
    size = tokens * t.inner * t.size
    rows = tape.op([weight], [size], new_gradients(table), more=tokens * INDEX)[0]
    masked = tape.op([rows], [size], new_gradients(size), more=tokens)[0]
    tape.free(rows)
    x = then(ctx, masked, resized(ctx, masked, size))
    for _ in range(2):  # laid out by columns, and those by rank
        x = then(ctx, x, resized(ctx, x, size))
    return then(ctx, x, resized(ctx, x, t.stream))


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
        own = ctx.groups[HEAD]
        normed = _marked(ctx, normed, lambda: gathering.reduced(own, own.wide, own.last))
    loss = (_loss if m.head == "lm" else _encoder_loss)(ctx, normed, weight)
    tape.free(normed)
    return loss if gathering is None else _marked(ctx, loss, lambda: tape.waiting.append([]))


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
        return then(ctx, y, shifted(ctx, y))
    return linear(ctx, x, (t.hidden, t.hidden))


def out_of_stage(ctx: TapeContext, y: Value) -> Value:
    """Ends a stage; zero=3 frees its last gathered weights, and gathers them for backward."""
    gathering = ctx.gathering
    if gathering is None:
        return y
    gathering.settle()
    return _marked(ctx, y, lambda: gathering.backward(ctx.groups[ENDS]))


def _marked(ctx: TapeContext, x: Value, event: Callable[[], None]) -> Value:
    """Returns x with an event when the backward comes by."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        event()
        return [named_again(grads[0])]

    value = ctx.tape.op([x], [x], back)[0]
    ctx.tape.free(x)
    return value


def _loss_in_chunks(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs the fused loss, whose forward makes the gradients, from a chunk of logits at a time."""
    tape, t = ctx.tape, ctx.t
    logits = t.tokens * vocabulary(ctx.work) * t.size
    part = min(t.tokens, chunk_rows(int(logits / t.tokens))) / t.tokens
    several = part < 1
    table = trained(ctx, logits / t.tokens * t.hidden)
    summed = table / t.size * t.wide if several else table

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(x.size), tape.new(table)]

    of_x = tape.new(x.size)
    made = [tape.new(summed)] if several else []
    tape.moment(part * logits + max(part * x.size, 0.0 if several else table))
    tape.free(of_x, *made)
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


def _table_bytes(ctx: TapeContext) -> float:
    """Bytes of this rank's shard of the vocabulary's table."""
    return vocabulary(ctx.work) * ctx.t.inner * ctx.t.size


def vocabulary_table(ctx: TapeContext, both: bool) -> Value:
    """Builds the vocabulary's table; where both ends share one, its two gradients are summed."""
    weight = leaf(vocabulary(ctx.work))
    if not (both and ctx.work.model.tie_embeddings):
        return weight
    return ctx.tape.op([weight], [0.0], same_gradient)[0]
