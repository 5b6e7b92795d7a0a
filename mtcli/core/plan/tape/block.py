"""A transformer block on a tape: attention, an MLP or experts, and the norms and sums between."""

from dataclasses import replace

from mtcli.core.plan.tape.attention import attention
from mtcli.core.plan.tape.autograd import Value, new_gradients
from mtcli.core.plan.tape.context import TapeContext
from mtcli.core.plan.tape.fsdp import BLOCK, ENDS, EXPERTS
from mtcli.core.plan.tape.mlp import mixture, mlp
from mtcli.core.plan.tape.ops import add_norm, dropout, norm


def block(ctx: TapeContext, x: Value, number: int = 0) -> Value:
    """x + attention(norm(x)), then x + mlp(norm(x)); of the order "post" the norms of sums."""
    if ctx.gathering is None:
        return _saved_or_recomputed(ctx, x)
    group, experts = (ctx.groups[i]._replace(name=f"{i} of {number}") for i in (BLOCK, EXPERTS))
    inside = replace(ctx, groups=(group, experts, *ctx.groups[ENDS:]))
    return ctx.gathering.around(group, x, lambda x: _saved_or_recomputed(inside, x))


def _saved_or_recomputed(ctx: TapeContext, x: Value) -> Value:
    if ctx.work.recompute == "full":
        return ctx.tape.recompute(lambda x: _block(ctx, x), x)
    return _block(ctx, x)


def _block(ctx: TapeContext, x: Value) -> Value:
    tape, m = ctx.tape, ctx.work.model
    if ctx.work.block_bytes:  # of code that is not ours, as a whole
        more = ctx.work.block_bytes - x.size
        return tape.op([x], [x.size], new_gradients(x.size), saved=[x], more=more)[0]
    width = m.ffn_hidden_size / ctx.work.columns
    if m.norm_order == "post":
        y = _norm_of_sum(ctx, x, attention(ctx, x))
        return _norm_of_sum(ctx, y, mlp(ctx, y, width))
    y = attention(ctx, norm(ctx, x))
    if m.dropout:
        total = dropout(ctx, y, x)
        del y
        normed = norm(ctx, total)
    else:
        total, normed = add_norm(ctx, x, y)
        del y
    part = mixture(ctx, normed) if m.num_experts else mlp(ctx, normed, width)
    return dropout(ctx, part, total)


def _norm_of_sum(ctx: TapeContext, x: Value, y: Value) -> Value:
    """norm(x + dropout(y))."""
    if ctx.work.model.dropout:
        return norm(ctx, dropout(ctx, y, x))
    return add_norm(ctx, x, y)[1]
