"""SwiGLU and GEGLU: silu(gate) * up, gelu(gate) * up (arXiv:2002.05202), where one GEMM computes
gate and up side by side.

N rows, F the inner width. A gate is "silu", "gelu", "gelu_tanh" or "clamped", gpt-oss's (up + 1) *
gate * sigmoid(alpha * gate), with gate clamped to at most a limit and up to -limit .. limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.gelu import _gate as _gelu_gate
from mtcli.kernels.gelu import _slope as _gelu_slope
from mtcli.kernels.triton_launch import kernel, runs_triton, tile_configs, tile_grid

if TYPE_CHECKING:
    import triton.language as tl


Gate = Literal["silu", "gelu", "gelu_tanh", "clamped"]


class Clamp(NamedTuple):
    """The numbers of the gate "clamped"; the others have none."""

    limit: float = 7.0
    alpha: float = 1.702


GPT_OSS = Clamp()


def swiglu_reference(gate_up: Tensor, gate: Gate = "silu", clamp: Clamp = GPT_OSS) -> Tensor:
    """[..., 2F], gate then up -> silu(gate) * up [..., F], gelu(gate) * up, or the clamped form."""
    inner, up = gate_up.chunk(2, -1)
    if gate == "silu":
        return F.silu(inner) * up
    if gate == "clamped":
        wide = torch.promote_types(inner.dtype, torch.float32)
        inner, up = inner.to(wide).clamp(max=clamp.limit), up.to(wide)
        shifted = up.clamp(-clamp.limit, clamp.limit) + 1.0
        return (shifted * inner * torch.sigmoid(clamp.alpha * inner)).to(gate_up.dtype)
    return F.gelu(inner, approximate=_APPROXIMATE[gate]) * up


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


@kernel()
def _clamped(x, least, most):
    """x within least .. most; NaN stays, which tl.minimum would hide."""
    return tl.where(x > most, most, tl.where(x < least, least, x))


@kernel(tile_configs, key=["width"])
def _forward(
    gate_up_ptr, out_ptr, rows, width, limit, alpha, GATE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """[rows, 2 width] -> [rows, width]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    at = gate_up_ptr + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    if GATE == "silu":
        out = gate * tl.sigmoid(gate) * up
    elif GATE == "clamped":
        gate, up = _clamped(gate, float("-inf"), limit), _clamped(up, -limit, limit)
        out = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    else:
        out = gate * _gelu_gate(gate, GATE == "gelu_tanh") * up
    tl.store(out_ptr + row * width + column, out, mask=inside)


@kernel(tile_configs, key=["width"])
def _backward(
    grad_ptr, gate_up_ptr, out_ptr, rows, width, limit, alpha, GATE: tl.constexpr,
    WITH_OUTPUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [rows, 2 width]; WITH_OUTPUT: the output of the forward is written over grad."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    at = row * 2 * width + column
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if GATE == "silu":
        share = tl.sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    elif GATE == "clamped":
        passes, up_passes = gate <= limit, tl.abs(up) <= limit
        gate, up = _clamped(gate, float("-inf"), limit), _clamped(up, -limit, limit) + 1.0
        share = tl.sigmoid(alpha * gate)
        slope = tl.where(passes, share * (1.0 + alpha * gate * (1.0 - share)), 0.0)
    else:
        share = _gelu_gate(gate, GATE == "gelu_tanh")
        slope = _gelu_slope(gate, GATE == "gelu_tanh")
    tl.store(out_ptr + at, grad * up * slope, mask=inside)
    of_up = grad * gate * share
    if GATE == "clamped":
        of_up = tl.where(up_passes, of_up, 0.0)
    tl.store(out_ptr + at + width, of_up, mask=inside)
    if WITH_OUTPUT:
        tl.store(grad_ptr + row * width + column, gate * share * up, mask=inside)


def swiglu(gate_up: Tensor, gate: Gate = "silu", clamp: Clamp = GPT_OSS) -> Tensor:
    """`swiglu_reference`, on a GPU in one pass and in float32; saves gate_up alone for backward.

    Bytes moved: 3 * N * F * itemsize forward, 5 * N * F * itemsize backward.
    """
    if runs_triton(gate_up):
        return _swiglu(gate_up, gate, *clamp)
    # torch.compile fuses the reference, and chooses what it saves.
    if torch.compiler.is_compiling():
        return swiglu_reference(gate_up, gate, clamp)
    return _SwiGLUFallback.apply(gate_up, gate, clamp)


class _SwiGLUFallback(torch.autograd.Function):
    """`swiglu_reference` by torch's functions; the backward recomputes the gate's activation.

    On a core of a Xeon (AVX-512), F 2048 and 2048 rows, forward and backward took 0.76 of the
    reference's time in float32, where gradients need no concatenation, and 1.04 in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gate: Gate, clamp: Clamp) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.options = gate, clamp
        if gate == "clamped":
            return swiglu_reference(gate_up, gate, clamp)
        inner, up = gate_up.chunk(2, -1)
        return _activated(inner, gate, torch.empty_like(inner)).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gradients, _ = _backward_fallback(grad, *ctx.saved_tensors, *ctx.options, with_output=False)
        return gradients, None, None


def swiglu_backward_(
    grad: Tensor, gate_up: Tensor, gate: Gate = "silu", clamp: Clamp = GPT_OSS
) -> tuple[Tensor, Tensor]:
    """(gradients of gate and up [N, 2F], the output of `swiglu` [N, F]), from grad [N, F].

    Overwrites grad on a GPU, where it moves 6 * N * F * itemsize bytes, N * F more than without the
    output, which the next linear layer then need not save for its weight's gradient.
    """
    if not runs_triton(grad):
        return _backward_fallback(grad, gate_up, gate, clamp, with_output=True)
    return _swiglu_backward_with_output(grad, gate_up, gate, *clamp), grad


def _activated(inner: Tensor, gate: Gate, out: Tensor) -> Tensor:
    """silu or gelu of `inner`, written to `out`."""
    if gate == "silu":
        return torch.ops.aten.silu.out(inner, out=out)
    return torch.ops.aten.gelu.out(inner, approximate=_APPROXIMATE[gate], out=out)


def _backward_fallback(
    grad: Tensor, gate_up: Tensor, gate: Gate, clamp: Clamp, with_output: bool
) -> tuple[Tensor, Tensor]:
    """(gradients of gate and up, the output or `grad`); each half of the gradient serves as scratch
    memory for the other."""
    if gate == "clamped":
        return _clamped_fallback(grad, gate_up, clamp)
    (inner, up), out = gate_up.chunk(2, -1), torch.empty_like(gate_up)
    dgate, dup = out.chunk(2, -1)
    _activated(inner, gate, dgate)
    torch.mul(grad, dgate, out=dup)
    result = dgate * up if with_output else grad
    torch.mul(grad, up, out=dgate)
    if gate == "silu":
        torch.ops.aten.silu_backward.grad_input(dgate, inner, grad_input=dgate)
    else:
        form = {"approximate": _APPROXIMATE[gate]}
        torch.ops.aten.gelu_backward.grad_input(dgate, inner, **form, grad_input=dgate)
    return out, result


def _clamped_fallback(grad: Tensor, gate_up: Tensor, clamp: Clamp) -> tuple[Tensor, Tensor]:
    """`_backward_fallback` of the gate "clamped", in float32 or wider."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    inner, up = gate_up.to(wide).chunk(2, -1)
    passes, up_passes = inner <= clamp.limit, up.abs() <= clamp.limit
    inner, up = inner.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit) + 1.0
    share = torch.sigmoid(clamp.alpha * inner)
    slope = share * (1.0 + clamp.alpha * inner * (1.0 - share))
    of_gate = (grad * up * slope).mul_(passes)
    of_up = (grad * inner * share).mul_(up_passes)
    gradients = torch.cat([of_gate, of_up], -1).to(gate_up.dtype)
    return gradients, (inner * share * up).to(gate_up.dtype)


def _half_width(gate_up: Tensor, *inputs: Any) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _like_gate_up(grad: Tensor, gate_up: Tensor, *inputs: Any) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


@custom_op(
    "swiglu(Tensor gate_up, str gate, float limit, float alpha) -> Tensor",
    fake=_half_width,
    saved=lambda out, *inputs: inputs,
    backward=lambda grad, *inputs: _swiglu_backward(grad, *inputs),
)
def _swiglu(gate_up, gate, *clamp):
    out = _half_width(gate_up)
    width = out.shape[-1]
    rows = out.numel() // width
    _forward[tile_grid(rows, width)](gate_up.contiguous(), out, rows, width, *clamp, GATE=gate)
    return out


@custom_op(
    "swiglu_backward(Tensor grad, Tensor gate_up, str gate, float limit, float alpha) -> Tensor",
    fake=_like_gate_up,
)
def _swiglu_backward(grad, gate_up, gate, *clamp):
    return _launch_backward(grad.contiguous(), gate_up, gate, clamp, with_output=False)


@custom_op(
    "swiglu_backward_with_output(Tensor(a!) grad, Tensor gate_up, str gate, float limit,"
    " float alpha) -> Tensor",
    fake=_like_gate_up,
)
def _swiglu_backward_with_output(grad, gate_up, gate, *clamp):
    assert grad.is_contiguous(), f"strides {grad.stride()}"
    return _launch_backward(grad, gate_up, gate, clamp, with_output=True)


def _launch_backward(
    grad: Tensor, gate_up: Tensor, gate: Gate, clamp: tuple[float, float], with_output: bool
) -> Tensor:
    gate_up, width = gate_up.contiguous(), grad.shape[-1]
    out, rows = torch.empty_like(gate_up), grad.numel() // width
    flags = {"GATE": gate, "WITH_OUTPUT": with_output}
    _backward[tile_grid(rows, width)](grad, gate_up, out, rows, width, *clamp, **flags)
    return out
