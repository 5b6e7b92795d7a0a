"""A block's MLP on a tape, or the mixture of experts instead of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mtcli.core.plan.tape.autograd import (
    Gradients,
    Storage,
    Tape,
    Value,
    new_gradients,
    same_gradient,
)
from mtcli.core.plan.tape.context import INDEX, TapeContext, trained
from mtcli.core.plan.tape.fsdp import EXPERTS
from mtcli.core.plan.tape.gemm import Weight, linear, recomputes_activation
from mtcli.core.plan.tape.ops import add, concatenated, moved, resized, reused, saved_by, views
from mtcli.core.plan.tape.tensor import column_linear, row_linear


def mlp(ctx: TapeContext, x: Value, width: float, name: str = "mlp") -> Value:
    """down(activation(up(x))), `width` of this rank; on a GPU the bias is GELU's."""
    m = ctx.work.model
    up = "gate_up" if m.is_gated else "up"
    inner = column_linear(ctx, x, (m.up_factor * width, ctx.t.inner), f"{name}.{up}")
    return row_linear(ctx, inner, (ctx.t.hidden, width), f"{name}.down", activated=True)


def mixture(ctx: TapeContext, x: Value) -> Value:
    """Runs a mixture of experts, with the shared expert."""
    m, on_grid = ctx.work.model, ctx.work.layout.tp_rows > 1
    own = replace(ctx, of_experts=True)
    entered = moved(ctx, x, x.size, x.size, x.size) if on_grid else x
    routed, weights = _routed(own, entered)
    y = dispatched(own, routed, weights)
    del weights
    if on_grid:
        del routed, entered
        y = moved(ctx, y, x.size, x.size, x.size)
    x = reused(ctx, x) if on_grid else routed
    if m.shared_expert_ffn_hidden_size:
        width = m.shared_expert_ffn_hidden_size / ctx.work.columns
        shared = mlp(ctx, x, width, "mlp.shared_expert")
        if m.shared_expert_gate:
            shared = _gated(ctx, saved_by(ctx, x, ctx.t.rows * ctx.t.size), shared)
        y = add(ctx, y, shared)
    return y


def _gated(ctx: TapeContext, gate: Value, x: Value) -> Value:
    """Multiplies x by its gate, a number per row."""
    sizes = gate.size, x.size

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        gradients: Gradients = [tape.new(size) for size in sizes]
        tape.moment(sizes[1])
        return gradients

    return ctx.tape.op([gate, x], [x.size], back, saved=[gate, x])[0]


def _routed(ctx: TapeContext, x: Value) -> tuple[Value, Value]:
    """Routes tokens: (x with the router's losses attached, the weights of the chosen experts)."""
    tape, t, m = ctx.tape, ctx.t, ctx.work.model
    table, chosen = t.rows * m.num_experts * t.wide, t.rows * m.top_k
    wide = resized(ctx, x, x.size / t.size * t.wide) if t.size < 4 else x
    kept = [] if ctx.work.lora.rank else [wide]
    logits = tape.op([wide], [table], new_gradients(wide.size), saved=kept)[0]
    del wide, kept
    tape.moment(2 * table * (1 + ctx.by_torch))
    more = table + chosen * (t.wide + INDEX)
    if m.aux_loss_coeff or m.sequence_aux_loss_coeff:
        more += table
    if m.capacity_factor:
        sharers = ctx.work.layout.cp * ctx.work.sequence_shards
        tape.moment(more + (2 + 4 * sharers) * table)
    weights = tape.op([logits], [chosen * t.wide], new_gradients(table), more=more)[0]
    del logits
    return reused(ctx, x), weights


def _gathered_experts(ctx: TapeContext, x: Value) -> Value:
    if ctx.gathering is None:
        return _experts(ctx, x)
    return ctx.gathering.around(ctx.groups[EXPERTS], x, lambda x: _experts(ctx, x))


def _experts(ctx: TapeContext, x: Value) -> Value:
    """Runs this rank's experts: by grouped GEMMs on a GPU, one after another on CPU."""
    m, work = ctx.work.model, ctx.work
    hidden, width = ctx.t.hidden, m.moe_ffn_hidden_size / work.layout.etp
    gated, number = m.up_factor, m.num_experts // work.layout.ep
    down = number * hidden * width * ctx.t.size
    tables = [_table(ctx, number * gated * width), _table(ctx, number * hidden)]
    if ctx.by_torch:
        return _one_by_one(ctx, x, tables, number)
    inner = _grouped_gemm(ctx, x, tables[0], gated * width / hidden, gated * down)
    recomputes = recomputes_activation(ctx)
    if not recomputes:
        inner = saved_by(ctx, inner, inner.size / gated)
    return _grouped_gemm(ctx, inner, tables[1], hidden / width, down, recomputes)


def _table(ctx: TapeContext, rows: float) -> Value:
    """Views all experts' weights of a kind as [experts, rows, columns]."""
    return ctx.tape.op([ctx.tape.leaf(rows)], [0.0], same_gradient)[0]


def _grouped_gemm(
    ctx: TapeContext, x: Value, table: Value, times: float, size: float, activated: bool = False
) -> Value:
    """Runs a grouped GEMM of x, or of activation(x), whose backward recomputes it in its gradient's
    memory. A row gets `times` as long; the weights have `size` bytes."""
    given = x.size / (ctx.work.model.up_factor if activated else 1)
    of_x, of_weight = x.size, trained(ctx, size)
    back = new_gradients(of_x, of_weight, moment=activated * (given + of_x + of_weight))
    ctx.tape.moment(activated * (given + times * given))
    kept = [x] if activated or not ctx.work.lora.rank else []
    return ctx.tape.op([x, table], [times * given], back, saved=kept)[0]


def _one_by_one(ctx: TapeContext, x: Value, tables: Sequence[Value], number: int) -> Value:
    """Runs each expert's rows through its own GEMMs; weight gradients are joined at the end."""
    m, size = ctx.work.model, ctx.t.size
    hidden, width = ctx.t.hidden, m.moe_ffn_hidden_size / ctx.work.layout.etp
    gated, rows = m.up_factor, ctx.work.expert_rows / number
    weight_bytes = hidden * width * size
    split = views(ctx, x, number, x.size)
    ups = views(ctx, tables[0], number, trained(ctx, gated * weight_bytes * number))
    downs = views(ctx, tables[1], number, trained(ctx, weight_bytes * number))
    parts = []
    for expert_rows, up, down in zip(split, ups, downs, strict=True):
        inner = linear(ctx, expert_rows, Weight(gated * width, hidden, up), rows)
        parts.append(linear(ctx, inner, Weight(hidden, width, down), activated=True))
        del inner
    return concatenated(ctx, parts, x.size)


class Routed(NamedTuple):
    """Sizes of what a dispatcher handles; bytes but for the two counts."""

    tokens: float
    copies: float  # of tokens that no capacity drops
    rows: float  # that the copies are stored in, padded experts' included
    num_copies: float
    num_chosen: float  # for copies: top_k of each token
    padding: float  # of copies that are put into rows of zeros, or 0

    @classmethod
    def of(cls, ctx: TapeContext, ranks: int, copies: float, rows: float) -> "Routed":
        """Sizes of the tokens of so many ranks, some copies and rows of which are here."""
        m, row, tokens = ctx.work.model, ctx.t.hidden * ctx.t.size, ranks * ctx.t.rows
        padding = copies * row * m.pad_to_capacity
        return cls(tokens * row, copies * row, rows * row, copies, tokens * m.top_k, padding)


def dispatched(ctx: TapeContext, x: Value, weights: Value) -> Value:
    """Dispatches tokens to experts and sums the results by token."""
    ways = {"all_to_all": _by_all_to_all, "all_gather": _by_all_gather}
    return ways[ctx.work.dispatcher](ctx, x, weights)


def _by_all_to_all(ctx: TapeContext, x: Value, weights: Value) -> Value:
    """Sends copies of tokens to their experts' ranks, and sorts them by expert there."""
    tape, work, layout = ctx.tape, ctx.work, ctx.work.layout
    routed = Routed.of(ctx, 1, work.sent_copies, work.sent_rows)
    travels = layout.ep * layout.etp > 1
    sent, here = routed.rows, work.expert_rows * ctx.t.hidden * ctx.t.size
    received = here / layout.etp
    order, back = (Value(tape.new(INDEX * work.expert_rows * travels)) for _ in range(2))
    rows = _spread(ctx, x, routed)
    if layout.ep > 1:
        rows = moved(ctx, rows, received, sent)
    if layout.etp > 1:
        gathered = moved(ctx, rows, here, received, here)
        rows = _reordered(ctx, gathered, order)
        del gathered
    elif travels:
        rows = _reordered(ctx, rows, order)
    results = _gathered_experts(ctx, rows)
    if travels:
        results = _reordered(ctx, results, back)
    if layout.etp > 1:
        results = moved(ctx, results, received, here, here)
    if layout.ep > 1:
        results = moved(ctx, results, sent, received)
    return _summed(ctx, results, weights, routed)


def _by_all_gather(ctx: TapeContext, x: Value, weights: Value) -> Value:
    """All-gathers an expert group's tokens, and reduce-scatters the results."""
    work = ctx.work
    ranks = work.layout.ep * work.layout.etp
    everyone = Routed.of(ctx, ranks, work.expert_copies, work.expert_rows)
    gathered = moved(ctx, x, ranks * x.size, x.size) if ranks > 1 else x
    rows = _spread(ctx, gathered, everyone)
    results = _gathered_experts(ctx, rows)
    del rows
    summed = _summed(ctx, results, weights, everyone)
    return summed if ranks == 1 else moved(ctx, summed, x.size, summed.size)


def _reordered(ctx: TapeContext, rows: Value, order: Value) -> Value:
    return ctx.tape.op([rows], [rows.size], new_gradients(rows.size), saved=[order])[0]


def _spread(ctx: TapeContext, x: Value, routed: Routed) -> Value:
    """Copies tokens, sorted by expert; torch makes the copies first, and then pads them."""
    besides = ctx.by_torch * routed.padding
    indices = routed.num_copies * (1 + (besides > 0)) if ctx.by_torch else routed.num_chosen
    back = new_gradients(x.size, moment=besides + x.size)
    ctx.tape.moment(besides + routed.rows)
    return ctx.tape.op([x], [routed.rows], back, more=indices * INDEX)[0]


def _summed(ctx: TapeContext, rows: Value, weights: Value, routed: Routed) -> Value:
    """Weighs rows and sums them by token."""
    if not ctx.by_torch:
        return ctx.tape.op(
            [rows, weights], [routed.tokens], new_gradients(rows.size, weights.size), saved=[rows]
        )[0]

    of_rows, of_weights = rows.size, weights.size

    def by_torch(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        gradient = tape.new(routed.copies)
        tape.moment(routed.padding + routed.copies)  # taken from the rows, and times the gradient
        if routed.padding:
            gradient = tape.new(of_rows)
        return [gradient, tape.new(of_weights)]

    ctx.tape.moment(routed.padding + routed.copies + routed.tokens)
    indices = routed.num_copies * (2 + (routed.padding > 0))
    more = indices * INDEX + routed.num_copies * ctx.t.size  # and weights
    return ctx.tape.op([rows, weights], [routed.tokens], by_torch, saved=[rows], more=more)[0]
