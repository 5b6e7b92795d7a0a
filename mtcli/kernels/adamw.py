"""AdamW (arXiv:1711.05101) of all parameters in one launch, including the rounding to 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
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

CONFIGS = tuple(
    {"BLOCK": block, "num_warps": warps} for block, warps in ((1024, 4), (2048, 8), (2048, 4))
)


def adamw_reference_(
    tensors: OptimizerTensors, gradients: Sequence[Tensor], update: OptimizerStep
) -> None:
    """Updates masters, moments and weights in place, a tensor at a time."""
    (beta1, beta2), count = update.betas, update.count
    for master, m, v, weight, decays, gradient in zip(*tensors, gradients, strict=True):
        g = gradient.to(master.dtype) * update.factor
        m.lerp_(g, 1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        master.mul_(1.0 - update.lr * update.decay * decays)
        root = (v / (1.0 - beta2**count)).sqrt_().add_(update.eps)
        master.addcdiv_(m, root, value=-update.lr / (1.0 - beta1**count))
        if weight.data_ptr() != master.data_ptr():
            weight.copy_(master)


@kernel()
def _block(
    addresses, start, numel, numbers, WHOLE: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    master_at, m_at, v_at, weight_at, gradient_at = addresses
    scale, one_less_beta1, beta2, one_less_beta2, eps, step, root, factor = numbers
    at = start + tl.arange(0, BLOCK)
    g = load_at(gradient_at, at, numel, WHOLE).to(tl.float32) * factor
    m = load_at(m_at, at, numel, WHOLE).to(tl.float32)
    v = load_at(v_at, at, numel, WHOLE).to(tl.float32)
    master = load_at(master_at, at, numel, WHOLE)
    m += (g - m) * one_less_beta1
    v = v * beta2 + g * g * one_less_beta2
    master = master * scale - step * m / (tl.sqrt(v) * root + eps)
    store_at(m_at, at, numel, m, WHOLE)
    store_at(v_at, at, numel, v, WHOLE)
    store_at(master_at, at, numel, master, WHOLE)
    if ROUNDS:
        store_at(weight_at, at, numel, master, WHOLE)


@kernel(CONFIGS)
def _adamw(
    table_ptr, chunks_ptr, moment_like, weight_like, gradient_like, factor_ptr, shrink,
    one_less_beta1, beta2, one_less_beta2, eps, step, root, ROUNDS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates one chunk of a tensor, unless the factor is NaN; the arguments `_like` only give
    dtypes.

    step is lr / (1 - beta1^t), root (1 - beta2^t)^-0.5.
    """
    factor = tl.load(factor_ptr)
    if factor != factor:
        return
    _, row, start, numel, decays, is_full = chunk_of(table_ptr, chunks_ptr, CHUNK)
    float_ptr = tl.pointer_type(tl.float32)
    addresses = (
        tl.load(row + 3).to(float_ptr),
        tl.load(row + 4).to(tl.pointer_type(moment_like.dtype.element_ty)),
        tl.load(row + 5).to(tl.pointer_type(moment_like.dtype.element_ty)),
        tl.load(row + 6).to(tl.pointer_type(weight_like.dtype.element_ty)),
        tl.load(row + 7).to(tl.pointer_type(gradient_like.dtype.element_ty)),
    )
    scale = tl.where(decays != 0, shrink, 1.0)
    numbers = (scale, one_less_beta1, beta2, one_less_beta2, eps, step, root, factor)
    if is_full:
        for done in range(0, CHUNK, BLOCK):
            _block(addresses, start + done, numel, numbers, True, ROUNDS, BLOCK)
    else:
        for done in range(0, CHUNK, BLOCK):
            _block(addresses, start + done, numel, numbers, False, ROUNDS, BLOCK)


def adamw_(
    table: TensorTable,
    tensors: OptimizerTensors,
    gradients: Sequence[Tensor],
    update: OptimizerStep,
) -> None:
    """`adamw_reference_` in one launch; `table` holds the addresses of `tensors`.

    Bytes moved per element: 8 for the master, 16 for moments in float32 and 8 in bfloat16, the
    gradient, and the weight if it is not its own master.
    """
    factor = update.factor
    if not isinstance(factor, Tensor):
        factor = torch.full((), factor, dtype=torch.float32, device=gradients[0].device)
    point_at_gradients_(table, gradients)
    (beta1, beta2), lr, count = update.betas, update.lr, update.count
    numbers = [
        1.0 - lr * update.decay, 1.0 - beta1, beta2, 1.0 - beta2, update.eps,
        lr / (1.0 - beta1**count), (1.0 - beta2**count) ** -0.5,
    ]  # fmt: skip
    first = (tensors.masters[0], tensors.exp_avgs[0], tensors.weights[0], gradients[0])
    _adamw_op(*table, *first, factor, numbers)


@custom_op(
    "adamw_(Tensor host, Tensor table, Tensor chunks, Tensor(a!) master, Tensor(b!) moment,"
    " Tensor(c!) weight, Tensor gradient, Tensor factor, float[] numbers) -> ()"
)
def _adamw_op(host, table, chunks, master, moment, weight, gradient, factor, numbers):
    """Takes one tensor per role: passing thousands through the dispatcher takes longer than the
    launch."""
    assert host[0, FIRST] == master.data_ptr(), "the table is of these tensors"
    flags = {"ROUNDS": weight.dtype != torch.float32, "CHUNK": CHUNK}
    _adamw[(len(chunks),)](table, chunks, moment, weight, gradient, factor, *numbers, **flags)
