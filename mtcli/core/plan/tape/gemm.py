"""GEMMs on a tape: by weights and of activations, also in float8 and, on CPU, in float32."""

from collections.abc import Sequence
from typing import NamedTuple

from mtcli.core.config.fp8 import is_narrow
from mtcli.core.plan.tape.autograd import Gradients, Storage, Tape, Value, WeightPass
from mtcli.core.plan.tape.context import TapeContext
from mtcli.core.plan.tape.ops import saved_by


class Weight(NamedTuple):
    """A weight [width, inner] of a GEMM x W^T: a layer's own, or a `value` that others have too."""

    width: float
    inner: float
    value: Value | None = None  # the head's or an expert's, which is never multiplied in float8
    adapters: int = 0  # trained instead of the weight, which is frozen

    def table(self, tape: Tape) -> Value:
        """The value that is multiplied: its own, or a new leaf of the tape."""
        return tape.leaf(self.width) if self.value is None else self.value


def linear(
    ctx: TapeContext, x: Value, weight: Weight, rows: float = 0.0, activated: bool = False
) -> Value:
    """Runs x W^T, or activation(x) W^T; `rows` of x where it is a view of some.

    A GPU's kernels save x alone, and recompute the activation in its gradient's memory. Where a run
    trains adapters, the weight is frozen, and x is saved for those.
    """
    width, inner, value, adapters = weight
    size, lora = ctx.work.sizes.weight, ctx.work.lora.rank
    recomputes = activated and not adapters and recomputes_activation(ctx)
    if activated and not recomputes:
        return linear(ctx, saved_by(ctx, x, x.size / ctx.work.model.up_factor), weight)
    given = rows * inner * size or x.size / (ctx.work.model.up_factor if recomputes else 1)
    out, weight_bytes = given / inner * width, width * inner * size
    of_input, entered = min(given, x.size), x.size
    table, is_parameter = weight.table(ctx.tape), value is None
    table_rows = table.edge.rows
    narrow = is_parameter and _is_narrow(ctx, width, inner)
    of_x, of_w, of_y = (_copied(ctx, full, narrow) for full in (given, weight_bytes, out))

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        tape.moment(gemm_bytes(ctx, of_y + of_w, of_input, narrow))
        operand = [tape.new(given)] if recomputes else saved
        gradient = tape.new(entered if recomputes else of_input)
        if lora:
            tape.moment((adapters > 0) * of_input)
            return [gradient, None]
        moment = gemm_bytes(ctx, of_y + of_x, weight_bytes, narrow)
        half = WeightPass(weight_bytes, table_rows, (*operand, grads[0]), moment)
        return [gradient, tape.weight(half, later=is_parameter)]

    copies = of_x + of_w
    if recomputes:
        ctx.tape.moment(given + max(copies, out))
    elif copies:
        ctx.tape.moment(gemm_bytes(ctx, copies, out, narrow))
    by_torch = not (copies or recomputes) and not (ctx.tape.splits and is_parameter)
    made = 0.0 if by_torch and ctx.tape.ends_next else out  # torch's keeps x before it runs
    low = adapters * lora * (given / inner + (adapters > 1) * width * size)  # A x, and B in blocks
    kept = [x] if adapters or recomputes or not lora else []
    return ctx.tape.op([x, table], [made], back, saved=kept, more=low)[0]


def _is_narrow(ctx: TapeContext, width: float, inner: float) -> bool:
    """Whether a parameter's GEMM is made in float8."""
    fp8 = ctx.work.sizes.gemm == "fp8"
    return fp8 and is_narrow(ctx.work.fp8_scaling, round(width), round(inner))


def _copied(ctx: TapeContext, size: float, narrow: bool) -> float:
    """Bytes of an operand's copy in float8, or on CPU in float32."""
    if narrow:
        return size / ctx.work.sizes.weight
    return 2 * size if ctx.slow else 0.0


def recomputes_activation(ctx: TapeContext) -> bool:
    """Whether a GPU's kernel recomputes activations; a recomputed block has them by then."""
    return not ctx.by_torch and ctx.work.recompute != "full"


def batched_gemm(
    ctx: TapeContext, factors: tuple[Value, Value], size: float, used: float = 0.0
) -> Value:
    """Runs a batched GEMM, in float32 where slow; `used` are the second factor's bytes in use."""
    (first, second), copies = factors, 2 * ctx.slow
    sizes = first.size, used or second.size

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        gradients: Gradients = []
        for operand, other in (sizes, sizes[::-1]):
            tape.moment(gemm_bytes(ctx, copies * (size + other), operand))
            gradients.append(tape.new(operand))
        return gradients

    ctx.tape.moment(gemm_bytes(ctx, copies * sum(sizes), size))
    return ctx.tape.op(factors, [size], back, saved=factors)[0]


def gemm_bytes(ctx: TapeContext, operands: float, result: float, narrow: bool = False) -> float:
    """Peak of a GEMM made of copies of its operands."""
    if narrow or not ctx.slow:
        return operands + result
    return 2 * result + max(operands, result)
