"""The ops between GEMMs on a tape: casts and copies, residual sums, norms, dropout."""

from collections.abc import Sequence

from mtcli.core.plan.tape.autograd import (
    Gradients,
    Storage,
    Tape,
    Value,
    new_gradients,
    same_gradient,
)
from mtcli.core.plan.tape.context import TapeContext
from mtcli.kernels.limits import random_bytes


def resized(ctx: TapeContext, x: Value, size: float) -> Value:
    """Casts or resizes x; nothing is saved."""
    return ctx.tape.op([x], [size], new_gradients(x.size))[0]


def reused(ctx: TapeContext, x: Value) -> Value:
    """Views x in the same memory, whose gradient is passed on as it is."""
    return ctx.tape.op([x], [x], same_gradient)[0]


def copied(ctx: TapeContext, x: Value, size: float) -> Value:
    """Copies x, maybe with a vector or other ranks' parts added; the gradient is passed on."""
    return ctx.tape.op([x], [size], same_gradient)[0]


def moved(ctx: TapeContext, x: Value, size: float, back_size: float, beside: float = 0.0) -> Value:
    """Copies, exchanges or casts x: `size` bytes, its gradient's `back_size`, `beside` each way."""
    ctx.tape.moment(beside + size)
    return ctx.tape.op([x], [size], new_gradients(back_size, moment=beside + back_size))[0]


def add(ctx: TapeContext, x: Value, y: Value) -> Value:
    """Adds x and y, whose gradient both get."""
    return concatenated(ctx, [x, y], x.size)


def views(ctx: TapeContext, x: Value, number: int, size: float) -> list[Value]:
    """Splits x into views, whose gradients are joined in `size` bytes."""
    return ctx.tape.op([x], [x] * number, new_gradients(size))


def concatenated(ctx: TapeContext, parts: Sequence[Value], size: float) -> Value:
    """Concatenates the parts in new memory, all of whose gradients are the result's."""
    count = len(parts)
    return ctx.tape.op(parts, [size], lambda tape, grads, saved: count * [grads[0]])[0]


def saved_by(ctx: TapeContext, x: Value, size: float) -> Value:
    """Runs an op that saves its input for backward."""
    return ctx.tape.op([x], [size], new_gradients(x.size), saved=[x])[0]


def norm(ctx: TapeContext, x: Value) -> Value:
    """Runs LayerNorm or RMSNorm of x, with statistics in float32."""
    t = ctx.t
    if ctx.work.layout.tp_rows > 1:
        return _row_norm(ctx, x)
    if ctx.cpu and ctx.work.model.norm == "rmsnorm":
        return _rms_norm_on_cpu(ctx, x)
    return ctx.tape.op([x], [x.size], new_gradients(x.size), saved=[x], more=2 * t.rows * t.wide)[0]


def add_norm(ctx: TapeContext, x: Value, y: Value) -> tuple[Value, Value]:
    """Runs (x + y, its norm), in one kernel where there is one."""
    t = ctx.t
    if ctx.by_torch or ctx.work.layout.tp_rows > 1:
        total = add(ctx, x, y)
        return total, norm(ctx, total)

    size = x.size

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        both = tape.new(size)
        return [both, both]

    stats = 2 * t.rows * t.wide
    total, normed = ctx.tape.op([x, y], [size, size], back, saves_results=[0], more=stats)
    return total, normed


def _row_norm(ctx: TapeContext, x: Value) -> Value:
    """Runs a norm over a row's ranks, by torch's operations in float32."""
    t = ctx.t
    wide = x.size / t.size * t.wide
    cast = wide * (t.size < 4)
    back = new_gradients(x.size, moment=cast + 3 * wide)
    ctx.tape.moment(cast + 2 * wide + x.size * bool(cast))
    return ctx.tape.op([x], [x.size], back, saved=[x], more=2 * t.rows * t.wide)[0]


def _rms_norm_on_cpu(ctx: TapeContext, x: Value) -> Value:
    """Runs x / sqrt(mean square) * weight, op by op in float32."""
    tape, t = ctx.tape, ctx.t
    wide_size, row = x.size / t.size * t.wide, t.rows * t.wide
    wide = resized(ctx, x, wide_size) if t.size < 4 else reused(ctx, x)

    def of_square(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        powers = tape.new(wide_size), tape.new(wide_size)
        out = tape.new(wide_size)
        del powers
        return [out]

    def of_scaled(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        of_x = tape.new(wide_size)
        tape.moment(wide_size + row)
        return [of_x, tape.new(row)]

    def of_weighted(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        out = tape.new(wide_size)
        tape.moment(wide_size)
        return [out]

    square = tape.op([wide], [wide_size], of_square, saved=[wide])[0]
    scale = tape.op([square], [row], new_gradients(wide_size), saves_results=[0])[0]
    del square
    scaled = tape.op([wide, scale], [wide_size], of_scaled, saved=[wide, scale])[0]
    del wide, scale
    kept = [] if ctx.work.lora.rank else [scaled]  # for the gradient of a weight that is trained
    weighted = tape.op([scaled], [wide_size], of_weighted, saved=kept)[0]
    del scaled, kept
    return weighted if t.size >= 4 else resized(ctx, weighted, x.size)


def dropout(ctx: TapeContext, y: Value, onto: Value | None) -> Value:
    """Adds dropout(y) to `onto`; torch saves the mask, a GPU's kernel hashes it again."""
    tape, drop = ctx.tape, ctx.work.model.dropout
    if not drop:
        assert onto is not None, "nothing to do"
        return add(ctx, onto, y)
    if not ctx.by_torch:
        inputs, size = [y] if onto is None else [y, onto], y.size
        added = len(inputs) - 1

        def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
            return [tape.new(size), *(added * [grads[0]])]

        return tape.op(inputs, [size], back)[0]
    tape.moment(random_bytes(y.size / ctx.t.size, round(ctx.t.hidden), ctx.cpu))
    dropped = tape.op([y], [y.size], new_gradients(y.size), more=y.size)[0]
    return dropped if onto is None else add(ctx, onto, dropped)
