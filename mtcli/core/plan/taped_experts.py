"""A mixture of experts on a tape: router, experts, and the shared one."""

from collections.abc import Sequence

from mtcli.core.plan.shapes import INDEX
from mtcli.core.plan.tape import Gradients, Storage, Tape, Value, leaf
from mtcli.core.plan.taped_dispatch import dispatched
from mtcli.core.plan.taped_layers import mlp
from mtcli.core.plan.taped_ops import (
    EXPERTS,
    Kit,
    activated_linear,
    add,
    apart,
    gates,
    joined,
    kept_by,
    linear,
    remakes,
    resized,
    same,
    then,
)
from mtcli.core.plan.taped_sharding import after, before


def mixture(kit: Kit, x: Value) -> Value:
    """The feed-forward part of a block of experts."""
    tape, m = kit.tape, kit.work.model
    routed = _routed(kit, x)
    weights = routed[1]
    y = dispatched(kit, routed[0], weights, _grouped)
    tape.free(weights)
    if m.shared_expert_ffn_hidden_size:
        shared = mlp(kit, routed[0], m.shared_expert_ffn_hidden_size / kit.work.layout.tp)
        if m.shared_expert_gate:
            gate = kept_by(kit, routed[0], kit.t.rows * kit.t.size)
            product = _gated(kit, gate, shared)
            tape.free(gate, shared)
            shared = product
        both = add(kit, y, shared)
        tape.free(y, shared)
        y = both
    tape.free(routed[0])
    return y


def _gated(kit: Kit, gate: Value, x: Value) -> Value:
    """A number per row times x."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        of_gate, of_x = tape.new(gate.size), tape.new(x.size)
        tape.moment(x.size)
        return [of_gate, of_x]

    return kit.tape.op([gate, x], [x.size], back, kept=[gate, x])[0]


def _routed(kit: Kit, x: Value) -> tuple[Value, Value]:
    """x with the router's losses attached, and the weights of its experts."""
    tape, t, m = kit.tape, kit.t, kit.work.model
    table, chosen = t.rows * m.num_experts * t.wide, t.rows * m.top_k
    wide = resized(kit, x, x.size / t.size * t.wide) if t.size < 4 else x

    def of_logits(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(wide.size)]

    def of_weights(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        tape.moment(table)
        return [tape.new(table)]

    logits = tape.op([wide], [table], of_logits, kept=[wide])[0]
    if wide is not x:
        tape.free(wide)
    tape.moment(2 * table * (1 + kit.by_torch))
    kept = table + chosen * (t.wide + INDEX)
    if m.aux_loss_coeff or m.sequence_aux_loss_coeff:
        kept += table
    if m.capacity_factor:
        whole = kit.work.layout.cp * kit.work.sequence_cut
        tape.moment(kept + (2 + 4 * whole) * table)
    weights = tape.op([logits], [chosen * t.wide], of_weights, more=kept)[0]
    tape.free(logits)
    same_x = tape.op([x], [x], lambda tape, grads: [same(grads[0])])[0]
    return same_x, weights


def _grouped(kit: Kit, x: Value) -> Value:
    if kit.gathering is None:
        return _experts(kit, x)
    group = kit.groups[EXPERTS]
    return after(kit.gathering, group, _experts(kit, before(kit.gathering, group, x)))


def _experts(kit: Kit, x: Value) -> Value:
    """This rank's experts: all at once by a GPU's kernels, one after another without and in fp8."""
    m, work = kit.work.model, kit.work
    hidden, width = kit.t.hidden, m.moe_ffn_hidden_size / work.layout.etp
    gated, number = gates(kit), m.num_experts // work.layout.ep
    down = number * hidden * width * kit.t.size
    tables = [_table(kit, number * gated * width), _table(kit, number * hidden)]
    if kit.by_torch or work.sizes.gemm == "fp8":
        return _one_by_one(kit, x, tables, number)
    inner = _batched(kit, x, tables[0], gated * width / hidden, gated * down)
    if remakes(kit):
        return then(kit, inner, _batched_activated(kit, inner, tables[1], hidden / width, down))
    active = then(kit, inner, kept_by(kit, inner, inner.size / gated))
    return then(kit, active, _batched(kit, active, tables[1], hidden / width, down))


def _table(kit: Kit, rows: float) -> Value:
    """All experts' weights of a kind, seen as [experts, rows, columns]."""
    return kit.tape.op([leaf(rows)], [0.0], lambda tape, grads: [same(grads[0])])[0]


def _batched(kit: Kit, x: Value, table: Value, times: float, size: float) -> Value:
    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(x.size), tape.new(size)]

    return kit.tape.op([x, table], [times * x.size], back, kept=[x])[0]


def _batched_activated(kit: Kit, x: Value, table: Value, times: float, size: float) -> Value:
    """The same of activation(x), which is made again where its gradient was."""
    given = x.size / gates(kit)

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        result = tape.new(given)
        found, of_weight = tape.new(x.size), tape.new(size)
        tape.free(result)
        return [found, of_weight]

    kit.tape.moment(given + times * given)
    return kit.tape.op([x, table], [times * given], back, kept=[x])[0]


def _one_by_one(kit: Kit, x: Value, tables: Sequence[Value], number: int) -> Value:
    """Each expert's rows through its own products; weight gradients wait until all are there."""
    tape, m, size = kit.tape, kit.work.model, kit.t.size
    hidden, width = kit.t.hidden, m.moe_ffn_hidden_size / kit.work.layout.etp
    gated, rows = gates(kit), kit.work.expert_rows / number
    one = hidden * width * size
    split = apart(kit, x, number, x.size)
    ups = apart(kit, tables[0], number, gated * one * number)
    downs = apart(kit, tables[1], number, one * number)
    parts = []
    for mine, up, down in zip(split, ups, downs, strict=True):
        inner = linear(kit, mine, (gated * width, hidden), rows, up)
        parts.append(then(kit, inner, activated_linear(kit, inner, (hidden, width), down)))
    y = joined(kit, parts, x.size)
    tape.free(*parts, *split)
    return y
