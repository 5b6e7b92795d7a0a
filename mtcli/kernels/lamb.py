"""LAMB (arXiv:1904.00962) of all parameters in two passes, with a reduction of norms in between.

m and v are AdamW's without bias correction, u = m / (sqrt(v) + eps) + decay * x, and the step of a
tensor x is -lr * c * u, with c = |x| / |u| within bounds, and 1 where a norm is 0. The first pass
returns the squares of both norms, which the caller sums over a tensor's shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.multi_tensor import (
    CHUNK,
    FIRST,
    OptimizerStep,
    OptimizerTensors,
    TensorTable,
    chunk_of,
    load_at,
    point_at_gradients_,
    store_at,
)
from mtcli.kernels.triton_launch import kernel

if TYPE_CHECKING:
    import triton.language as tl

CONFIGS = tuple({"BLOCK": block, "num_warps": warps} for block, warps in ((1024, 4), (2048, 8)))
# Elements that the references take at once, and allocate two more tensors of.
SLICE = 2**16


def lamb_moments_reference_(
    tensors: OptimizerTensors, gradients: Sequence[Tensor], update: OptimizerStep
) -> Tensor:
    """Updates the moments; returns |x|^2 and |u|^2 of every tensor, float64 [tensors, 2]."""
    (beta1, beta2), squares = update.betas, []
    for master, exp_avg, exp_avg_sq, _, decays, gradient in zip(*tensors, gradients, strict=True):
        norms = []
        for x, m, v, g in _slices(master, exp_avg, exp_avg_sq, gradient):
            g = g.to(x.dtype) * update.factor
            m.lerp_(g, 1.0 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
            u = _direction_reference(x, m, v, update.decay * decays, update.eps)
            norms.append(torch.stack([x.norm(), u.norm()]))
        squares.append(torch.stack(norms).double().square().sum(0))
    return torch.stack(squares) if squares else torch.zeros(0, 2, dtype=torch.float64)


def trust_ratios(squares: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Computes |x| / |u| within bounds, 1 where either is 0, from squares [tensors, 2]."""
    of_x, of_u = squares.sqrt().unbind(1)
    ratios = (of_x / of_u).clamp(*bounds)
    return torch.where((of_x > 0) & (of_u > 0), ratios, torch.ones_like(ratios))


def lamb_step_reference_(tensors: OptimizerTensors, ratios: Tensor, update: OptimizerStep) -> None:
    """Subtracts lr * ratio * u of every tensor, and rounds the weights."""
    for master, exp_avg, exp_avg_sq, _, decays, ratio in zip(*tensors, ratios, strict=True):
        for x, m, v in _slices(master, exp_avg, exp_avg_sq):
            u = _direction_reference(x, m, v, update.decay * decays, update.eps)
            x.sub_(u.mul_(update.lr * ratio))
    tensors.round_()


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.view(-1).split(SLICE) for x in tensors), strict=True)


def _direction_reference(x: Tensor, m: Tensor, v: Tensor, decay: float, eps: float) -> Tensor:
    root = v.sqrt().add_(eps)
    return torch.div(m, root, out=root).add_(x, alpha=decay)


@kernel()
def _direction(master, m, v, decay, eps):
    """Computes u, the update before its length."""
    return m / (tl.sqrt(v) + eps) + decay * master


@kernel()
def _moments_block(
    addresses, start, numel, numbers, of_x, of_u, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Updates BLOCK elements of the moments; adds to the sums of x^2 and of u^2."""
    master_at, m_at, v_at, gradient_at = addresses
    one_less_beta1, beta2, one_less_beta2, eps, decay, factor = numbers
    at = start + tl.arange(0, BLOCK)
    g = load_at(gradient_at, at, numel, WHOLE).to(tl.float32) * factor
    m, v = load_at(m_at, at, numel, WHOLE), load_at(v_at, at, numel, WHOLE)
    master = load_at(master_at, at, numel, WHOLE)
    m += (g - m) * one_less_beta1
    v = v * beta2 + g * g * one_less_beta2
    u = _direction(master, m, v, decay, eps)
    if not WHOLE:
        u = tl.where(at < numel, u, 0.0)
    store_at(m_at, at, numel, m, WHOLE)
    store_at(v_at, at, numel, v, WHOLE)
    return of_x + master * master, of_u + u * u


@kernel(CONFIGS)
def _moments(
    table_ptr, chunks_ptr, squares_ptr, gradient_like, one_less_beta1, beta2, one_less_beta2, eps,
    decay, factor, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates the moments; squares [chunks, 2] are the sums of x^2 and of u^2."""
    _, row, start, numel, decays, is_full = chunk_of(table_ptr, chunks_ptr, CHUNK)
    float_ptr = tl.pointer_type(tl.float32)
    addresses = (
        tl.load(row + 3).to(float_ptr),
        tl.load(row + 4).to(float_ptr),
        tl.load(row + 5).to(float_ptr),
        tl.load(row + 7).to(tl.pointer_type(gradient_like.dtype.element_ty)),
    )
    decay = tl.where(decays != 0, decay, 0.0)
    numbers = (one_less_beta1, beta2, one_less_beta2, eps, decay, factor)
    of_x, of_u = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if is_full:
        for done in range(0, CHUNK, BLOCK):
            of_x, of_u = _moments_block(
                addresses, start + done, numel, numbers, of_x, of_u, True, BLOCK
            )
    else:
        for done in range(0, CHUNK, BLOCK):
            of_x, of_u = _moments_block(
                addresses, start + done, numel, numbers, of_x, of_u, False, BLOCK
            )
    tl.store(squares_ptr + tl.program_id(0) * 2, tl.sum(of_x, 0))
    tl.store(squares_ptr + tl.program_id(0) * 2 + 1, tl.sum(of_u, 0))


@kernel()
def _totals(table_ptr, chunks_ptr, squares_ptr, totals_ptr, CHUNK: tl.constexpr):
    """Sums a tensor's squares, in one order, in the program of its first chunk."""
    tensor = tl.load(chunks_ptr + tl.program_id(0) * 2)
    chunk = tl.load(chunks_ptr + tl.program_id(0) * 2 + 1)
    count = tl.where(chunk == 0, (tl.load(table_ptr + tensor * 8) + CHUNK - 1) // CHUNK, 0)
    squares_ptr, lane = squares_ptr + tl.program_id(0) * 2, tl.arange(0, 256)
    of_x, of_u = tl.zeros((256,), tl.float32), tl.zeros((256,), tl.float32)
    for first in range(0, count, 256):
        of_x += tl.load(squares_ptr + (first + lane) * 2, mask=first + lane < count, other=0.0)
        of_u += tl.load(squares_ptr + (first + lane) * 2 + 1, mask=first + lane < count, other=0.0)
    tl.store(totals_ptr + tensor * 2, tl.sum(of_x, 0), mask=chunk == 0)
    tl.store(totals_ptr + tensor * 2 + 1, tl.sum(of_u, 0), mask=chunk == 0)


@kernel()
def _step_block(
    addresses, start, numel, numbers, WHOLE: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    master_at, m_at, v_at, weight_at = addresses
    length, eps, decay = numbers
    at = start + tl.arange(0, BLOCK)
    m, v = load_at(m_at, at, numel, WHOLE), load_at(v_at, at, numel, WHOLE)
    master = load_at(master_at, at, numel, WHOLE)
    master -= length * _direction(master, m, v, decay, eps)
    store_at(master_at, at, numel, master, WHOLE)
    if ROUNDS:
        store_at(weight_at, at, numel, master, WHOLE)


@kernel(CONFIGS)
def _step(
    table_ptr, chunks_ptr, ratios_ptr, weight_like, lr, eps, decay,
    ROUNDS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates the masters, and rounds them to the weights."""
    tensor, row, start, numel, decays, is_full = chunk_of(table_ptr, chunks_ptr, CHUNK)
    float_ptr = tl.pointer_type(tl.float32)
    addresses = (
        tl.load(row + 3).to(float_ptr),
        tl.load(row + 4).to(float_ptr),
        tl.load(row + 5).to(float_ptr),
        tl.load(row + 6).to(tl.pointer_type(weight_like.dtype.element_ty)),
    )
    numbers = (lr * tl.load(ratios_ptr + tensor), eps, tl.where(decays != 0, decay, 0.0))
    if is_full:
        for done in range(0, CHUNK, BLOCK):
            _step_block(addresses, start + done, numel, numbers, True, ROUNDS, BLOCK)
    else:
        for done in range(0, CHUNK, BLOCK):
            _step_block(addresses, start + done, numel, numbers, False, ROUNDS, BLOCK)


def lamb_moments_(
    table: TensorTable,
    tensors: OptimizerTensors,
    gradients: Sequence[Tensor],
    update: OptimizerStep,
) -> Tensor:
    """`lamb_moments_reference_` in one large and one small launch, float32 [tensors, 2].

    `table` holds the addresses of `tensors`. Bytes moved per element: 20, and the gradient.
    """
    point_at_gradients_(table, gradients)
    numbers = [*update.betas, update.eps, update.decay, update.factor]
    return _moments_op(*table, tensors.masters[0], gradients[0], numbers)


def lamb_step_(
    table: TensorTable, tensors: OptimizerTensors, ratios: Tensor, update: OptimizerStep
) -> None:
    """`lamb_step_reference_` in one launch, after `lamb_moments_` of the same tensors.

    Bytes moved per element: 16, and the weight if it is not its own master.
    """
    numbers = [update.lr, update.eps, update.decay]
    _step_op(*table, tensors.masters[0], tensors.weights[0], ratios.float(), numbers)


@custom_op(
    "lamb_moments_(Tensor host, Tensor table, Tensor chunks, Tensor master, Tensor gradient,"
    " float[] numbers) -> Tensor",
    fake=lambda host, table, chunks, master, *inputs: master.new_empty(len(host), 2),
)
def _moments_op(host, table, chunks, master, gradient, numbers):
    assert host[0, FIRST] == master.data_ptr(), "the table is of these tensors"
    beta1, beta2, eps, decay, factor = numbers
    squares = master.new_empty(len(chunks), 2)
    # Zeros, as a tensor of no elements has no program.
    totals = master.new_zeros(len(host), 2)
    betas, grid = (1.0 - beta1, beta2, 1.0 - beta2), (len(chunks),)
    _moments[grid](table, chunks, squares, gradient, *betas, eps, decay, factor, CHUNK=CHUNK)
    _totals[grid](table, chunks, squares, totals, CHUNK=CHUNK)
    return totals


@custom_op(
    "lamb_step_(Tensor host, Tensor table, Tensor chunks, Tensor(a!) master, Tensor(b!) weight,"
    " Tensor ratios, float[] numbers) -> ()"
)
def _step_op(host, table, chunks, master, weight, ratios, numbers):
    assert host[0, FIRST] == master.data_ptr(), "the table is of these tensors"
    flags = {"ROUNDS": weight.dtype != torch.float32, "CHUNK": CHUNK}
    _step[(len(chunks),)](table, chunks, ratios, weight, *numbers, **flags)
