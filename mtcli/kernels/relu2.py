"""Squared ReLU: relu(x)^2 (arXiv:2109.08668, section 3).

N rows of F columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import kernel, runs_triton, tile_configs, tile_grid

if TYPE_CHECKING:
    import triton.language as tl


def relu2_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """relu(x + bias)^2 of x [..., F] and bias [F]."""
    return F.relu(x if bias is None else x + bias).square()


@kernel(tile_configs, key=["width"])
def _forward(x_ptr, out_ptr, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside, at = (row < rows) & (column < width), row * width + column
    x = tl.maximum(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    tl.store(out_ptr + at, x * x, mask=inside)


@kernel(tile_configs, key=["width"])
def _backward(
    grad_ptr, x_ptr, out_ptr, rows, width, WITH_OUTPUT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """WITH_OUTPUT: the output of the forward is written over grad."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside, at = (row < rows) & (column < width), row * width + column
    x = tl.maximum(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, 2.0 * x * grad, mask=inside)
    if WITH_OUTPUT:
        tl.store(grad_ptr + at, x * x, mask=inside)


def relu2(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`relu2_reference`, on a GPU computed in float32.

    Bytes moved there: 2 * N * F * itemsize forward, 3 * N * F * itemsize backward. A bias, which no
    published model with this activation has, is added ahead of the kernel.
    """
    if not runs_triton(x):
        return relu2_reference(x, bias)
    return _relu2(x if bias is None else x + bias)


def relu2_backward_(
    grad: Tensor, x: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(gradient of x [..., F], of bias [F] or None, the output of `relu2`), from grad [..., F].

    Overwrites grad. On a GPU it moves 4 * N * F * itemsize bytes, N * F more than without the
    output, which the next linear layer then need not save for its weight's gradient.
    """
    x = x if bias is None else x + bias
    if runs_triton(grad):
        dx = _relu2_backward_with_output(grad, x)
    else:
        positive = F.relu(x)
        dx = (2.0 * positive).mul_(grad)
        torch.mul(positive, positive, out=grad)
    return dx, None if bias is None else dx.flatten(0, -2).sum(0), grad


@custom_op(
    "relu2(Tensor x) -> Tensor",
    saved=lambda out, x: (x,),
    backward=lambda grad, x: _relu2_backward(grad, x),
)
def _relu2(x):
    x, width = x.contiguous(), x.shape[-1]
    out, rows = torch.empty_like(x), x.numel() // width
    _forward[tile_grid(rows, width)](x, out, rows, width)
    return out


@custom_op("relu2_backward(Tensor grad, Tensor x) -> Tensor")
def _relu2_backward(grad, x):
    return _launch_backward(grad.contiguous(), x, with_output=False)


@custom_op("relu2_backward_with_output(Tensor(a!) grad, Tensor x) -> Tensor")
def _relu2_backward_with_output(grad, x):
    assert grad.is_contiguous(), f"strides {grad.stride()}"
    return _launch_backward(grad, x, with_output=True)


def _launch_backward(grad: Tensor, x: Tensor, with_output: bool) -> Tensor:
    x, width = x.contiguous(), x.shape[-1]
    out, rows = torch.empty_like(x), x.numel() // width
    _backward[tile_grid(rows, width)](grad, x, out, rows, width, WITH_OUTPUT=with_output)
    return out
