"""Counts the live bytes of one micro-batch on a pipeline stage: saved ones, and the peaks.

A stage is its blocks, with the embedding before the first and a head with its loss after the last.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from mtcli.core.config.model import MASKED_SHARE
from mtcli.core.plan.rank_bytes import StageBytes
from mtcli.core.plan.tape.autograd import (
    Gradients,
    PendingGradients,
    Storage,
    Tape,
    Value,
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
    Weight,
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
    trained,
    vocabulary,
)
from mtcli.core.plan.workload import Workload
from mtcli.kernels.limits import CPU_BLOCK_BYTES, chunk_rows


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
    plain, block = _run(
        TapeContext(Tape(owners, work.splits_backward), work, kernels), ends, layers
    )
    if not groups:
        return plain
    tape = Tape()
    ctx = TapeContext(tape, work, kernels, Gathering(tape), groups)
    sharded, _ = _run(ctx, ends, layers, block)
    return plain._replace(
        forward_peak=sharded.forward_peak,
        backward_peak=sharded.backward_peak,
        gathered=groups[ENDS].weights,
    )


def _run(
    ctx: TapeContext, ends: tuple[bool, bool], layers: int, known: float = 0.0
) -> tuple[StageBytes, float]:
    """Runs a stage forward and back: (the stage's bytes, the bytes that a block saves).

    `known` is what a block saves, where a run before this one has counted it; 0 counts it here.
    """
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
    found = StageBytes(
        saved=saved,
        waiting=waiting,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        weight_peak=weight_peak,
        sent=stream * (not first),
    )
    return found, each


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


def vocabulary_table(ctx: TapeContext, both: bool) -> Value:
    """Builds the vocabulary's table; where both ends share one, its two gradients are summed."""
    weight = ctx.tape.leaf(vocabulary(ctx.work))
    if not (both and ctx.work.model.tie_embeddings):
        return weight
    return ctx.tape.op([weight], [0.0], same_gradient)[0]


def embedded(ctx: TapeContext, weight: Value) -> Value:
    """Runs the embedding, with learned positions and token types, the norm of the order "post", and
    dropout."""
    tape, t, m = ctx.tape, ctx.t, ctx.work.model
    if ctx.work.layout.tp_rows > 1:  # every row's tokens are looked up, and each is sent its own
        x = _looked_up(ctx, weight, ctx.work.tokens, t.inner)
        for size in (x.size, x.size, x.size, t.stream):  # two laid out: by columns, and by rank
            x = resized(ctx, x, size)
    else:
        x = leave(ctx, _looked_up(ctx, weight, t.tokens, t.hidden))
    for rows in (m.max_seq_len * (m.position == "learned"), m.token_types):
        if rows:
            back = new_gradients(trained(ctx, rows * t.hidden * t.size))
            row = tape.op([tape.leaf(rows)], [t.stream], back, more=t.rows * INDEX)[0]
            x = add(ctx, x, row)
            del row
    if m.norm_order == "post":
        x = norm(ctx, x)
    return dropout(ctx, x, None) if m.dropout else x


def _looked_up(ctx: TapeContext, weight: Value, tokens: float, width: float) -> Value:
    """Looks up tokens in a vocabulary shard, and zeroes the rows of other shards' tokens."""
    size = tokens * width * ctx.t.size
    back = new_gradients(trained(ctx, vocabulary(ctx.work) * ctx.t.inner * ctx.t.size))
    rows = ctx.tape.op([weight], [size], back, more=tokens * INDEX)[0]
    return ctx.tape.op([rows], [size], new_gradients(size), more=tokens)[0]


def head(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs the head with its loss.

    zero=3 reduces the head's gradients as soon as the loss has made them; a tied table's waits for
    the embedding's.
    """
    tape, gathering = ctx.tape, ctx.gathering
    with_loss = _loss if ctx.work.model.head == "lm" else _encoder_loss
    if gathering is None:
        return with_loss(ctx, x, weight)
    x = marked(tape, x, lambda: gathering.reduced(ctx.groups[HEAD]))
    return marked(tape, with_loss(ctx, x, weight), lambda: tape.waiting.append([]))


def _loss(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs the loss over the vocabulary, of as many tokens as the ctx has."""
    on_grid = ctx.work.layout.tp_rows > 1
    gathered = reused(ctx, x) if on_grid else enter(ctx, x)
    by_torch = ctx.by_torch or on_grid
    return (_loss_by_torch if by_torch else _loss_in_chunks)(ctx, gathered, weight)


def _encoder_loss(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs the loss of masked tokens and of sequences, or of sequences alone."""
    work, tape = ctx.work, ctx.tape
    m, losses = work.model, []
    if m.head == "mlm":
        tokens = replace(ctx, of_head=ceil(MASKED_SHARE * ctx.t.rows))
        y = _picked(tokens, x, ctx.t.tokens * INDEX)
        y = _dense(tokens, y)
        y = saved_by(tokens, y, y.size)  # the activation
        y = norm(tokens, y)
        losses.append(_loss(tokens, y, weight))
        del y
    if m.head != "mlm" or m.sentence_order:
        rows = work.row_sequences * work.sequences
        first = replace(ctx, of_head=rows)
        y = _picked(first, x, rows * INDEX)
        y = _dense(first, y)
        y = tape.op([y], [y.size], new_gradients(y.size), saves_results=[0])[0]
        losses.append(saved_by(first, y, 0.0))
        del y
    return concatenated(ctx, losses, 0.0)


def _picked(ctx: TapeContext, x: Value, index: float) -> Value:
    """Picks the rows of x that a head takes, by `index` bytes of them."""
    return ctx.tape.op([x], [ctx.t.stream], new_gradients(x.size), more=index)[0]


def _dense(ctx: TapeContext, x: Value) -> Value:
    """Runs a square layer of the head."""
    t = ctx.t
    if ctx.work.layout.tp_rows > 1:
        y = grid_gemm(ctx, x, Weight(t.hidden, t.inner))
        return copied(ctx, y, y.size)
    return linear(ctx, x, Weight(t.hidden, t.hidden))


def _loss_in_chunks(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs the fused loss, whose forward makes the gradients, from a chunk of logits at a time."""
    tape, t = ctx.tape, ctx.t
    logits = t.tokens * vocabulary(ctx.work) * t.size
    part = min(t.tokens, chunk_rows(int(logits / t.tokens))) / t.tokens
    several = part < 1
    table = trained(ctx, logits / t.tokens * t.hidden)
    summed = table / t.size * t.wide if several else table
    made = x.size + summed * several
    tape.moment(made + part * logits + max(part * x.size, 0.0 if several else table))
    back = new_gradients(x.size, table)
    return tape.op([x, weight], [0.0], back, more=x.size + summed)[0]


def _loss_by_torch(ctx: TapeContext, x: Value, weight: Value) -> Value:
    """Runs torch's loss: exponentials, and then their gradient, in the logits' memory. Narrow ones
    are made from a wide copy of two blocks' columns, without the vocabulary's padding."""
    tape, t, columns = ctx.tape, ctx.t, vocabulary(ctx.work)
    multiply = grid_gemm if ctx.work.layout.tp_rows > 1 else linear
    logits = multiply(ctx, x, Weight(columns, t.inner, weight))
    valid = min(1.0, ctx.work.model.vocab_size / columns)
    copied = valid * min(logits.size, 2 * CPU_BLOCK_BYTES) / t.size
    copy = 0.0 if t.size >= 4 else copied * t.wide
    more = t.tokens * (INDEX + 1 + 2 * t.wide)
    tape.moment(more + copy)

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        return [saved[0]]

    return tape.op([logits], [0.0], back, saved=[logits], more=more)[0]
