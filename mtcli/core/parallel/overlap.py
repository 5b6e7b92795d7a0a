"""Tensor parallel linear layers whose collectives travel while their GEMMs run.

T tokens of a micro-batch, n tp ranks with t = T/n of them under sequence parallelism; a column
layer's weight is [F, D], a row layer's [D, F]. Wang et al., ASPLOS 2023, decompose collectives so
(doi:10.1145/3567955.3567959); here:

- a column layer multiplies this rank's tokens while those of the others are gathered, and sums the
  gradient of its input over ranks behind the GEMM of its weight's gradient;
- a row layer sums its output in chunks of tokens, each behind the GEMM of the next, and multiplies
  this rank's gradient while those of the others are gathered.

torch's fused_all_gather_matmul and fused_matmul_reduce_scatter do the same over symmetric memory,
which they need a GPU with NVLink to allocate, and they take no sink of gradients.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.core.parallel.collectives import (
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from mtcli.core.parallel.groups import Axis
from mtcli.kernels.activation import Activation
from mtcli.kernels.gemm import DEFAULT_GEMMS, DeferGradient, matmul, matmul_into, weight_gradient
from mtcli.kernels.gradient_sink import GradientSink
from mtcli.kernels.limits import exchange_chunks


class Overlap(NamedTuple):
    """What a layer exchanges, and where its weight's gradients go."""

    axis: Axis
    shards_tokens: bool  # sequence parallelism
    defer: DeferGradient | None = None
    sink: GradientSink | None = None


def hides_collectives(x: Tensor) -> bool:
    """Whether collectives of tensors like x travel beside GEMMs: on a CPU they take its cores."""
    return x.device.type != "cpu" and not torch.compiler.is_compiling()


class OverlappedColumn(torch.autograd.Function):
    """x weight^T + bias of the tokens of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap
    ) -> Tensor:
        """x [t, D] ([T, D] without sequence parallelism) -> [T, F]."""
        if overlap.shards_tokens:
            x, y_TF = _gathered(x, weight.T, overlap.axis, bias)
        else:
            y_TF = DEFAULT_GEMMS.forward(x, weight, bias)
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.overlap = overlap
        return y_TF

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias, of those that need one."""
        (x_TD, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        overlap: Overlap = ctx.overlap
        summed = _start_sum(matmul(grad, weight), overlap) if needs[0] else lambda: None
        of_weight = _weight_gradient(overlap, weight, grad, x_TD) if needs[1] else None
        of_bias = grad.sum(0) if needs[2] else None
        return summed(), of_weight, of_bias, None


class OverlappedRow(torch.autograd.Function):
    """The sum over ranks of activation(x + bias) weight^T; x itself without an activation."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no containers of tensors
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        activation: Activation | None,
        overlap: Overlap,
    ) -> Tensor:
        """x [T, F] ([T, 2F] with a gate) -> [t, D] ([T, D] without sequence parallelism)."""
        ctx.save_for_backward(x, bias, weight)
        ctx.activation, ctx.overlap = activation, overlap
        x_TF = x if activation is None else activation.forward(x, bias)
        return _summed(x_TF, weight.T, overlap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, bias and, if it is trained, weight."""
        x, bias, weight = ctx.saved_tensors
        overlap: Overlap = ctx.overlap
        if overlap.shards_tokens:
            grad, of_x = _gathered(grad, weight, overlap.axis)
        else:
            of_x = matmul(grad, weight)
        of_bias, inner_TF = None, x
        if ctx.activation is not None:
            of_x, of_bias, inner_TF = ctx.activation.backward_(of_x, x, bias)
        needs_weight = ctx.needs_input_grad[2]
        of_weight = _weight_gradient(overlap, weight, grad, inner_TF) if needs_weight else None
        return of_x, of_bias, of_weight, None, None


def _weight_gradient(overlap: Overlap, weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    return weight_gradient(DEFAULT_GEMMS, overlap.defer, overlap.sink, weight, grad, x)


def _gathered(
    x_tD: Tensor, right_DF: Tensor, axis: Axis, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(tokens of all ranks [T, D], their product [T, F]): this rank's first, as it has them."""
    x_tD, t = x_tD.contiguous(), len(x_tD)
    x_TD = x_tD.new_empty(axis.size * t, x_tD.shape[1])
    y_TF = x_tD.new_empty(len(x_TD), right_DF.shape[1])
    gather = start_all_gather(x_TD, x_tD, axis)
    first, end = axis.rank * t, (axis.rank + 1) * t
    matmul_into(y_TF[first:end], x_tD, right_DF, bias)
    gather.wait()
    for rows in (slice(0, first), slice(end, None)):
        if len(x_TD[rows]):
            matmul_into(y_TF[rows], x_TD[rows], right_DF, bias)
    return x_TD, y_TF


def _summed(x_TF: Tensor, right_FD: Tensor, overlap: Overlap) -> Tensor:
    """The sum over ranks of x right, of this rank's tokens [t, D], or of all [T, D]."""
    axis, ranks = overlap.axis, overlap.axis.size if overlap.shards_tokens else 1
    x_ntF = x_TF.unflatten(0, (ranks, -1))
    y_tD = x_TF.new_empty(x_ntF.shape[1], right_FD.shape[1])
    right_nFD, sums = right_FD.expand(ranks, -1, -1), []  # torch would copy rows to fold them
    for rows in _chunks(y_tD, ranks):
        if overlap.shards_tokens:
            part_ntD = matmul(x_ntF[:, rows], right_nFD)
            sums.append(start_reduce_scatter(y_tD[rows], part_ntD, axis))
        else:
            matmul_into(y_tD[rows], x_TF[rows], right_FD)
            sums.append(start_all_reduce(y_tD[rows], axis))
    for work in sums:
        work.wait()
    return y_tD


def _chunks(y_tD: Tensor, ranks: int) -> Iterator[slice]:
    """Rows of as equal chunks as possible."""
    rows, moved = len(y_tD), ranks * y_tD.numel() * y_tD.element_size()
    count = min(exchange_chunks(moved), max(1, rows))
    ends = [rows * chunk // count for chunk in range(count + 1)]
    return (slice(*pair) for pair in zip(ends, ends[1:], strict=False))


def _start_sum(x_TD: Tensor, overlap: Overlap) -> Callable[[], Tensor]:
    """Starts to sum x [T, D] over ranks; the returned function waits, and returns this rank's
    tokens [t, D], or all of them."""
    axis, out = overlap.axis, x_TD
    if overlap.shards_tokens:
        out = x_TD.new_empty(len(x_TD) // axis.size, x_TD.shape[1])
        work = start_reduce_scatter(out, x_TD, axis)
    else:
        work = start_all_reduce(x_TD, axis)

    def summed() -> Tensor:
        work.wait()
        return out

    return summed
