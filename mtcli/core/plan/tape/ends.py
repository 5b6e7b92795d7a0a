"""A model's ends on a tape: the embedding, and the heads with their losses."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from mtcli.core.config.model import MASKED_SHARE
from mtcli.core.plan.tape.autograd import (
    Gradients,
    Storage,
    Tape,
    Value,
    new_gradients,
    same_gradient,
)
from mtcli.core.plan.tape.context import INDEX, TapeContext, trained, vocabulary
from mtcli.core.plan.tape.fsdp import HEAD, marked
from mtcli.core.plan.tape.gemm import Weight, linear
from mtcli.core.plan.tape.ops import (
    add,
    concatenated,
    copied,
    dropout,
    norm,
    resized,
    reused,
    saved_by,
)
from mtcli.core.plan.tape.tensor import enter, leave
from mtcli.core.plan.tape.tensor_2d import grid_gemm
from mtcli.kernels.limits import CPU_BLOCK_BYTES, chunk_rows


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
