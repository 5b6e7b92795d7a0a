"""Norms, dropout and the feed-forward part on a tape, by a GPU's kernels or by torch on CPU."""

from collections.abc import Sequence

from mtcli.core.plan.tape import Gradients, Storage, Tape, Value
from mtcli.core.plan.taped_ops import (
    Kit,
    activated_linear,
    add,
    column_linear,
    gates,
    resized,
    reused,
    row_linear,
    same,
    then,
)

HASHED = 3  # 64-bit numbers at once while a mask is drawn on CPU


def norm(kit: Kit, x: Value) -> Value:
    """LayerNorm or RMSNorm of x, with statistics in float32."""
    t = kit.t
    if kit.cpu and kit.work.model.norm == "rmsnorm":
        return _rms_norm_on_cpu(kit, x)

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(x.size)]

    return kit.tape.op([x], [x.size], back, kept=[x], more=2 * t.rows * t.wide)[0]


def add_norm(kit: Kit, x: Value, y: Value) -> tuple[Value, Value]:
    """(x + y, its norm), in one kernel where there is one."""
    t = kit.t
    if kit.by_torch:
        total = add(kit, x, y)
        return total, norm(kit, total)

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        both = tape.new(x.size)
        return [both, same(both)]

    stats = 2 * t.rows * t.wide
    total, normed = kit.tape.op([x, y], [x.size, x.size], back, keeps_results=[0], more=stats)
    return total, normed


def _rms_norm_on_cpu(kit: Kit, x: Value) -> Value:
    """x / sqrt(mean square) * weight, op by op in float32."""
    tape, t = kit.tape, kit.t
    wide_size, row = x.size / t.size * t.wide, t.rows * t.wide
    wide = resized(kit, x, wide_size) if t.size < 4 else reused(kit, x)

    def of_square(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        powers = tape.new(wide_size), tape.new(wide_size)
        out = tape.new(wide_size)
        tape.free(*powers)
        return [out]

    def of_mean(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(wide_size)]

    def of_scaled(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        of_x = tape.new(wide_size)
        tape.moment(wide_size + row)
        return [of_x, tape.new(row)]

    def of_weighted(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        out = tape.new(wide_size)
        tape.moment(wide_size)
        return [out]

    square = tape.op([wide], [wide_size], of_square, kept=[wide])[0]
    scale = tape.op([square], [row], of_mean, keeps_results=[0])[0]
    tape.free(square)
    scaled = tape.op([wide, scale], [wide_size], of_scaled, kept=[wide, scale])[0]
    tape.free(wide, scale)
    weighted = tape.op([scaled], [wide_size], of_weighted, kept=[scaled])[0]
    tape.free(scaled)
    if t.size >= 4:
        return weighted
    y = resized(kit, weighted, x.size)
    tape.free(weighted)
    return y


def dropout(kit: Kit, y: Value, onto: Value | None) -> Value:
    """`onto` + y with elements dropped; torch keeps the mask, a GPU's kernel draws it again."""
    tape, drop = kit.tape, kit.work.model.dropout
    if not drop:
        assert onto is not None, "nothing to do"
        return add(kit, onto, y)
    if not kit.by_torch:
        taken = [y] if onto is None else [y, onto]

        def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
            return [tape.new(y.size), *(same(grads[0]) for _ in taken[1:])]

        return tape.op(taken, [y.size], back)[0]

    def masked(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(y.size)]

    tape.moment(HASHED * 8 * y.size / kit.t.size)
    dropped = tape.op([y], [y.size], masked, more=y.size)[0]
    if onto is None:
        return dropped
    total = add(kit, onto, dropped)
    tape.free(dropped)
    return total


def mlp(kit: Kit, x: Value, width: float) -> Value:
    """down(activation(up(x))), `width` of this rank; on a GPU the bias is GELU's."""
    hidden = kit.t.hidden
    inner = column_linear(kit, x, (gates(kit) * width, hidden))
    return then(kit, inner, row_linear(kit, inner, (hidden, width), activated_linear))
