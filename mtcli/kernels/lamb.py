"""LAMB (arXiv:1904.00962) of all parameters in two launches, with the norms of its trust ratio.

m and v are AdamW's without bias correction, u = m / (sqrt(v) + eps) + decay * x, and each tensor x
loses lr * c * u, where c = |x| / |u| within bounds, and 1 where a norm is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.adamw import Parts
from mtcli.kernels.launch import kernel, operator
from mtcli.kernels.packed import CHUNK, Packed, fill_, pointers_at

if TYPE_CHECKING:
    import triton.language as tl

TILES = tuple({"BLOCK": block, "num_warps": warps} for block, warps in ((1024, 4), (2048, 8)))


class LambUpdate(NamedTuple):
    """An update's numbers; gradients are multiplied by `factor` first."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    bounds: tuple[float, float]  # of the trust ratio
    factor: float = 1.0


def lamb_reference_(parts: Parts, gradients: Sequence[Tensor], update: LambUpdate) -> Tensor:
    """One update in place; returns the trust ratios, float32 [tensors]."""
    beta1, beta2 = update.betas
    ratios = []
    for master, m, v, weight, decays, gradient in zip(*parts, gradients, strict=True):
        g = gradient.to(master.dtype) * update.factor
        m.lerp_(g, 1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        u = m / (v.sqrt() + update.eps) + update.decay * decays * master
        of_x, of_u = master.norm(), u.norm()
        ratio = (of_x / of_u).clamp(*update.bounds)
        ratios.append(torch.where((of_x > 0) & (of_u > 0), ratio, torch.ones_like(ratio)))
        master.sub_(update.lr * ratios[-1] * u)
        if weight.data_ptr() != master.data_ptr():
            weight.copy_(master)
    return torch.stack(ratios).float()


@kernel()
def _direction(master, m, v, decay, eps):
    """The step before its length."""
    return m / (tl.sqrt(v) + eps) + decay * master


@kernel(TILES)
def _moments(
    table_ptr, chunks_ptr, squares_ptr, gradient_like, one_less_beta1, beta2, one_less_beta2, eps,
    decay, factor, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip  # squares [chunks, 2]: of the masters and of the steps
    tensor = tl.load(chunks_ptr + tl.program_id(0) * 2)
    start = tl.load(chunks_ptr + tl.program_id(0) * 2 + 1) * CHUNK
    row = table_ptr + tensor * 8
    numel, decays = tl.load(row), tl.load(row + 1)
    float_ptr = tl.pointer_type(tl.float32)
    master_at, m_at = tl.load(row + 2).to(float_ptr), tl.load(row + 3).to(float_ptr)
    v_at = tl.load(row + 4).to(float_ptr)
    gradient_at = tl.load(row + 6).to(tl.pointer_type(gradient_like.dtype.element_ty))
    decay = tl.where(decays != 0, decay, 0.0)
    of_x, of_u = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for done in range(0, CHUNK, BLOCK):
        at = start + done + tl.arange(0, BLOCK)
        inside = at < numel
        g = tl.load(pointers_at(gradient_at, at, ALIGNED), mask=inside, other=0.0)
        g = g.to(tl.float32) * factor
        m = tl.load(pointers_at(m_at, at, ALIGNED), mask=inside, other=0.0)
        v = tl.load(pointers_at(v_at, at, ALIGNED), mask=inside, other=0.0)
        master = tl.load(pointers_at(master_at, at, ALIGNED), mask=inside, other=0.0)
        m += (g - m) * one_less_beta1
        v = v * beta2 + g * g * one_less_beta2
        u = tl.where(inside, _direction(master, m, v, decay, eps), 0.0)
        of_x += master * master
        of_u += u * u
        tl.store(pointers_at(m_at, at, ALIGNED), m, mask=inside)
        tl.store(pointers_at(v_at, at, ALIGNED), v, mask=inside)
    tl.store(squares_ptr + tl.program_id(0) * 2, tl.sum(of_x, 0))
    tl.store(squares_ptr + tl.program_id(0) * 2 + 1, tl.sum(of_u, 0))


@kernel(TILES)
def _step(
    table_ptr, chunks_ptr, squares_ptr, ratios_ptr, weight_like, lr, eps, decay, lowest, highest,
    ALIGNED: tl.constexpr, ROUNDS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip  # every program sums its tensor's squares, in one order
    tensor = tl.load(chunks_ptr + tl.program_id(0) * 2)
    chunk = tl.load(chunks_ptr + tl.program_id(0) * 2 + 1)
    row, start = table_ptr + tensor * 8, chunk * CHUNK
    numel, decays = tl.load(row), tl.load(row + 1)
    count, lane = (numel + CHUNK - 1) // CHUNK, tl.arange(0, 256)
    squares_ptr += (tl.program_id(0) - chunk) * 2
    of_x, of_u = tl.zeros((256,), tl.float32), tl.zeros((256,), tl.float32)
    for first in range(0, count, 256):
        of_x += tl.load(squares_ptr + (first + lane) * 2, mask=first + lane < count, other=0.0)
        of_u += tl.load(squares_ptr + (first + lane) * 2 + 1, mask=first + lane < count, other=0.0)
    x, u = tl.sqrt(tl.sum(of_x, 0)), tl.sqrt(tl.sum(of_u, 0))
    some = (x > 0.0) & (u > 0.0)
    ratio = tl.minimum(tl.maximum(x / tl.where(some, u, 1.0), lowest), highest)
    ratio = tl.where(some, ratio, 1.0)
    tl.store(ratios_ptr + tensor, ratio, mask=chunk == 0)
    float_ptr = tl.pointer_type(tl.float32)
    master_at, m_at = tl.load(row + 2).to(float_ptr), tl.load(row + 3).to(float_ptr)
    v_at = tl.load(row + 4).to(float_ptr)
    weight_at = tl.load(row + 5).to(tl.pointer_type(weight_like.dtype.element_ty))
    decay = tl.where(decays != 0, decay, 0.0)
    for done in range(0, CHUNK, BLOCK):
        at = start + done + tl.arange(0, BLOCK)
        inside = at < numel
        m = tl.load(pointers_at(m_at, at, ALIGNED), mask=inside, other=0.0)
        v = tl.load(pointers_at(v_at, at, ALIGNED), mask=inside, other=0.0)
        master = tl.load(pointers_at(master_at, at, ALIGNED), mask=inside, other=0.0)
        master -= lr * ratio * _direction(master, m, v, decay, eps)
        tl.store(pointers_at(master_at, at, ALIGNED), master, mask=inside)
        if ROUNDS:
            tl.store(pointers_at(weight_at, at, ALIGNED), master, mask=inside)


def lamb_(packed: Packed, parts: Parts, gradients: Sequence[Tensor], update: LambUpdate) -> Tensor:
    """`lamb_reference_` in two launches; `packed` is for tensors as the masters.

    Bytes moved per element: 36 of masters and moments, the gradient, and the weight if it is not
    its own master.
    """
    assert len({x.dtype for x in gradients}) == 1, "gradients of one launch share a dtype"
    numbers = [update.lr, *update.betas, update.eps, update.decay, *update.bounds, update.factor]
    return _op(*packed, *(list(part) for part in parts), list(gradients), numbers)


def _run(
    host: Tensor, table: Tensor, chunks: Tensor, masters: list[Tensor], exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor], weights: list[Tensor], decays: list[bool],
    gradients: list[Tensor], numbers: list[float],
) -> Tensor:  # fmt: skip
    kinds = (masters, exp_avgs, exp_avg_sqs, weights, gradients)
    aligned = fill_(Packed(host, table, chunks), kinds, decays)
    lr, beta1, beta2, eps, decay, *bounds, factor = numbers
    squares = masters[0].new_empty(len(chunks), 2)
    ratios = masters[0].new_ones(len(masters))  # a tensor of no elements has no program
    shared = {"ALIGNED": aligned, "CHUNK": CHUNK}
    betas = (1.0 - beta1, beta2, 1.0 - beta2)
    pointers, grid = (table, chunks, squares), (len(chunks),)
    _moments[grid](*pointers, gradients[0], *betas, eps, decay, factor, **shared)
    shared["ROUNDS"] = weights[0].dtype != torch.float32
    _step[grid](*pointers, ratios, weights[0], lr, eps, decay, *bounds, **shared)
    return ratios


_op = operator(
    "lamb_(Tensor(a!) host, Tensor(b!) table, Tensor chunks, Tensor(c!)[] masters,"
    " Tensor(d!)[] exp_avgs, Tensor(e!)[] exp_avg_sqs, Tensor(f!)[] weights, bool[] decays,"
    " Tensor[] gradients, float[] numbers) -> Tensor",
    _run,
    lambda host, table, chunks, masters, *others: masters[0].new_empty(len(masters)),
)
