"""GELU (arXiv:1606.08415) fused with the bias before it; exact, or by tanh as in GPT-2.

N rows of F columns. The kernels compute 0.5 (1 + tanh(u)) as sigmoid(2u). The backward runs a few
persistent programs per SM, each of which sums the bias's gradient over its rows in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.launch import cdiv, kernel, multiprocessors, runs_triton, tile_grid

if TYPE_CHECKING:
    import triton.language as tl

Approximate = Literal["none", "tanh"]
CONFIGS = (
    {"ROWS": 1, "COLUMNS": 2048, "num_warps": 4},
    {"ROWS": 1, "COLUMNS": 1024, "num_warps": 4},
    {"ROWS": 4, "COLUMNS": 512, "num_warps": 4},
    {"ROWS": 2, "COLUMNS": 2048, "num_warps": 8},
)
PERSISTENT_CONFIGS = [{"ROWS": rows, "num_warps": warps} for rows in (4, 1, 8) for warps in (4, 8)]
PERSISTENT_COLUMNS = 512


def gelu_reference(x: Tensor, bias: Tensor | None, approximate: Approximate = "none") -> Tensor:
    """gelu(x + bias) of x [..., F] and bias [F]."""
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


@kernel()
def _gate(x, TANH: tl.constexpr):
    """GELU(x) / x."""
    if TANH:
        # 1.59... is 2 sqrt(2 / pi).
        return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@kernel()
def _slope(x, TANH: tl.constexpr):
    """The derivative of GELU at x."""
    gate = _gate(x, TANH)
    if TANH:
        return gate + x * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    # 0.39... is 1 / sqrt(2 pi).
    return gate + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


# fmt: off
@kernel(CONFIGS, key=["width"])
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


# fmt: off
@kernel(PERSISTENT_CONFIGS, key=["width"])
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
    """`gelu_reference`, in float32 within.

    Bytes moved on a GPU: 2 * N * F * itemsize forward, 3 * N * F * itemsize backward, with the
    gradient of the bias.
    """
    if not runs_triton(x):
        return gelu_reference(x, bias, approximate)
    return _gelu(x, bias, approximate == "tanh")


def gelu_backward_(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: Approximate = "none"
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(gradient of x [..., F], of bias [F] or None, and the output of `gelu`), from grad [..., F].

    Overwrites grad. On a GPU 4 * N * F * itemsize bytes are moved, N * F more than without the
    output, which a linear layer after it then need not save for its weight's gradient.
    """
    if runs_triton(grad):
        dx, dbias = _gelu_backward_with_output(grad, x, bias, approximate == "tanh")
        return dx, None if bias is None else dbias, grad
    whole = x if bias is None else x + bias
    dx = torch.ops.aten.gelu_backward(grad, whole, approximate=approximate)
    torch.ops.aten.gelu.out(whole, approximate=approximate, out=grad)
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


def _fake_backward(grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
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
    out, rows, blocks = torch.empty_like(x), x.numel() // width, cdiv(width, PERSISTENT_COLUMNS)
    programs = max(1, min(rows, cdiv(8 * multiprocessors(x), blocks)))
    parts = x.new_empty(programs if has_bias else 0, width, dtype=torch.float32)
    pointers = (grad, x, bias if has_bias else x, out, parts)
    flags = {"HAS_BIAS": has_bias, "TANH": tanh, "WITH_OUTPUT": with_output}
    _backward[(programs, blocks)](*pointers, rows, width, **flags, COLUMNS=PERSISTENT_COLUMNS)
    return out, parts.sum(0).to(x.dtype)
