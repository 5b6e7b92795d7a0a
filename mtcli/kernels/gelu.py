"""GELU (arXiv:1606.08415) fused with the bias ahead of it; exact, or with tanh as in GPT-2.

N rows of F columns. The kernels compute 0.5 (1 + tanh(u)) as sigmoid(2u). The backward runs a few
persistent programs per SM, each of which sums the bias's gradient over its rows in float32.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import (
    cdiv,
    kernel,
    multiprocessors,
    runs_triton,
    tile_configs,
    tile_grid,
)

if TYPE_CHECKING:
    import triton.language as tl

Approximate = Literal["none", "tanh"]


def gelu_reference(x: Tensor, bias: Tensor | None, approximate: Approximate = "none") -> Tensor:
    """gelu(x + bias) of x [..., F] and bias [F]."""
    x = x if bias is None else x + bias
    if approximate == "tanh" and torch.compiler.is_compiling():
        # 0.5 (1 + tanh(u)) = sigmoid(2u), of which inductor's code on CPU takes a third of the time
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        gate = torch.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
        return (wide * gate).to(x.dtype)
    return F.gelu(x, approximate=approximate)


@kernel()
def _normal_tail(x):
    """(Phi(-|x|), exp(-x^2 / 2)), by Abramowitz and Stegun's formula 7.1.26 for erf.

    Its error, 0.75e-7 of Phi, is float32's rounding of it; GELU takes 25 instructions instead of
    tl.erf's 37, and without the cancellation of 1 + erf(x) where x is negative.
    """
    t = 1.0 / (1.0 + 0.23164188 * tl.abs(x))
    inner = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
    polynomial = t * (0.127414796 + t * (-0.142248368 + t * inner))
    # 0.72... is 0.5 / log(2).
    density = tl.exp2(-0.7213475204444817 * x * x)
    return polynomial * density, density


@kernel()
def _gate(x, TANH: tl.constexpr):
    """GELU(x) / x."""
    if TANH:
        # 1.59... is 2 sqrt(2 / pi).
        return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    tail, _ = _normal_tail(x)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@kernel()
def _slope(x, TANH: tl.constexpr):
    """The derivative of GELU at x."""
    gate = _gate(x, TANH)
    if TANH:
        return gate + x * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    _, density = _normal_tail(x)
    # 0.39... is 1 / sqrt(2 pi).
    return gate + x * density * 0.3989422804014327


# fmt: off
@kernel(tile_configs, key=["width"])
def _forward(
    x_ptr, bias_ptr, out_ptr, rows, width, HAS_BIAS: tl.constexpr, TANH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: on
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, x * _gate(x, TANH), mask=inside)


def _columns(width: int) -> int:
    """The columns of a persistent program: 512, or 256 where that pads a row less."""
    return min((512, 256), key=lambda n: cdiv(width, n) * n)


@cache
def _persistent_configs(width: int) -> list[dict[str, int]]:
    rows = 2048 // _columns(width)
    return [{"ROWS": n, "num_warps": warps} for n in (rows, 1, 2 * rows) for warps in (4, 8)]


# fmt: off
@kernel(_persistent_configs, key=["width"])
def _backward(
    grad_ptr, x_ptr, bias_ptr, out_ptr, parts_ptr, rows, width,
    HAS_BIAS: tl.constexpr, TANH: tl.constexpr, WITH_OUTPUT: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: on
    """WITH_OUTPUT: the output of the forward is written over grad."""
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    real = column < width
    bias = tl.zeros([1, COLUMNS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < rows) & real
        at = row * width + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        out = grad * _slope(x, TANH)
        dbias += out
        tl.store(out_ptr + at, out, mask=inside)
        if WITH_OUTPUT:
            tl.store(grad_ptr + at, x * _gate(x, TANH), mask=inside)
    if HAS_BIAS:
        at = parts_ptr + tl.program_id(0) * width + column
        tl.store(at, tl.sum(dbias, 0)[None, :], mask=real)


def gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> Tensor:
    """`gelu_reference`, computed in float32.

    Bytes moved on a GPU: 2 * N * F * itemsize forward, 3 * N * F * itemsize backward, including the
    bias's gradient.
    """
    if not runs_triton(x):
        return gelu_reference(x, bias, approximate)
    return _gelu(x, bias, approximate == "tanh")


def gelu_backward_(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: Approximate = "none"
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(gradient of x [..., F], of bias [F] or None, the output of `gelu`), from grad [..., F].

    Overwrites grad. On a GPU it moves 4 * N * F * itemsize bytes, N * F more than without the
    output, which the next linear layer then need not save for its weight's gradient.
    """
    if runs_triton(grad):
        dx, dbias = _gelu_backward_with_output(grad, x, bias, approximate == "tanh")
        return dx, None if bias is None else dbias, grad
    biased = x if bias is None else x + bias
    dx = torch.ops.aten.gelu_backward(grad, biased, approximate=approximate)
    torch.ops.aten.gelu.out(biased, approximate=approximate, out=grad)
    return dx, None if bias is None else dx.flatten(0, -2).sum(0), grad


@custom_op(
    "gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor",
    saved=lambda out, x, bias, tanh: (x, bias, tanh),
    backward=lambda grad, x, bias, tanh: (
        _gelu_backward(grad, x, bias, tanh)[: 1 if bias is None else 2]
    ),
)
def _gelu(x, bias, tanh):
    x, width, has_bias = x.contiguous(), x.shape[-1], bias is not None
    out, rows = torch.empty_like(x), x.numel() // width
    pointers, flags = (x, bias if has_bias else x, out), {"HAS_BIAS": has_bias, "TANH": tanh}
    _forward[tile_grid(rows, width)](*pointers, rows, width, **flags)
    return out


def _fake_backward(grad: Tensor, x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(x.shape[-1])


@custom_op(
    "gelu_backward(Tensor grad, Tensor x, Tensor? bias, bool tanh) -> (Tensor, Tensor)",
    fake=_fake_backward,
)
def _gelu_backward(grad, x, bias, tanh):
    return _launch_backward(grad.contiguous(), x, bias, tanh, with_output=False)


@custom_op(
    "gelu_backward_with_output(Tensor(a!) grad, Tensor x, Tensor? bias, bool tanh)"
    " -> (Tensor, Tensor)",
    fake=_fake_backward,
)
def _gelu_backward_with_output(grad, x, bias, tanh):
    assert grad.is_contiguous(), f"strides {grad.stride()}"
    return _launch_backward(grad, x, bias, tanh, with_output=True)


def _launch_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, with_output: bool
) -> tuple[Tensor, Tensor]:
    x, width, has_bias = x.contiguous(), x.shape[-1], bias is not None
    out, rows = torch.empty_like(x), x.numel() // width
    columns = _columns(width)
    blocks = cdiv(width, columns)
    # As many as registers hold at once: 96 for each thread if exact, else 80.
    programs = max(1, min(rows, (6 if tanh else 5) * multiprocessors(x) // blocks))
    parts = x.new_empty(programs if has_bias else 0, width, dtype=torch.float32)
    pointers = (grad, x, bias if has_bias else x, out, parts)
    flags = {"HAS_BIAS": has_bias, "TANH": tanh, "WITH_OUTPUT": with_output}
    _backward[(programs, blocks)](*pointers, rows, width, **flags, COLUMNS=columns)
    return out, parts.sum(0).to(x.dtype)
