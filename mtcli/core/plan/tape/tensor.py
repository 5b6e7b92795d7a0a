"""Tensor parallel linear layers on a tape (parallel/tensor.py), or on a grid those of the grid."""

from mtcli.core.mesh.adapters import chosen_targets
from mtcli.core.plan.tape.autograd import Value, new_gradients
from mtcli.core.plan.tape.context import TapeContext
from mtcli.core.plan.tape.gemm import Weight, linear
from mtcli.core.plan.tape.ops import copied, resized, reused
from mtcli.core.plan.tape.tensor_2d import grid_gemm, row_gemm


def column_linear(ctx: TapeContext, x: Value, shape: tuple[float, float], layer: str) -> Value:
    """Runs this rank's columns of a GEMM, of a block's layer."""
    if ctx.work.layout.tp_rows > 1:
        return grid_gemm(ctx, x, Weight(*shape))
    return linear(ctx, enter(ctx, x), Weight(*shape, adapters=targets(ctx, layer)))


def row_linear(
    ctx: TapeContext, x: Value, shape: tuple[float, float], layer: str, activated: bool = False
) -> Value:
    """Sums every rank's partial GEMMs, of a block's layer, and adds a bias."""
    if ctx.work.layout.tp_rows > 1:
        return row_gemm(ctx, x, shape[1], activated)
    weight = Weight(*shape, adapters=targets(ctx, layer))
    y = leave(ctx, linear(ctx, x, weight, activated=activated))
    return reused(ctx, y) if ctx.work.model.bias else y


def targets(ctx: TapeContext, layer: str) -> int:
    """Counts the adapters of a block's linear layer, such as "attention.qkv"."""
    work = ctx.work
    if not work.lora.rank:
        return 0
    return len(chosen_targets(f"blocks.0.{layer}.weight", work.model, work.lora))


def enter(ctx: TapeContext, x: Value) -> Value:
    """All-gathers the input [T, D] of a tensor parallel region."""
    tape, tp = ctx.tape, ctx.work.layout.tp
    if tp == 1:
        return reused(ctx, x)
    if ctx.work.sequence_parallel:
        return resized(ctx, x, tp * x.size)
    return tape.op([x], [x], new_gradients(x.size))[0]


def leave(ctx: TapeContext, x: Value) -> Value:
    """Reduces the output of a tensor parallel region."""
    tp = ctx.work.layout.tp
    if tp == 1:
        return reused(ctx, x)
    if ctx.work.sequence_parallel:
        return resized(ctx, x, x.size / tp)
    return copied(ctx, x, x.size)
