"""One rank's share of softmax cross entropy over a sharded vocabulary, in place on the logits.

On a GPU `row_parts` reads the logits once, and `logits_gradient_` overwrites them by their
gradient: 3 * T * V * itemsize bytes moved in all. On CPU, where computing an exponential costs more
than storing it, the forward overwrites logits by exponentials, and the backward those by gradients.

On CPU all passes of a block of rows run before the next block, which fits the L2 cache: on 2 cores,
[4096, 8192] float32, forward and backward took 0.6 of the time of passes over the whole tensor
(benchmarks/bench_train.py measures their step).
A `cap` above 0 replaces each logit by cap * tanh(logit / cap) as it is read.
T tokens, V columns of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtcli.kernels import limits
from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.softcap import softcap, softcap_slope, tanh
from mtcli.kernels.triton_launch import cdiv, kernel, runs_triton

if TYPE_CHECKING:
    import triton.language as tl


def row_max(logits_TV: Tensor) -> Tensor:
    """The maximum of each row [T] in float32 (float64 stays); -inf without columns."""
    if logits_TV.shape[1] == 0:
        return logits_TV.new_full(logits_TV.shape[:1], float("-inf"), dtype=_wide(logits_TV))
    return logits_TV.amax(-1).to(_wide(logits_TV))


def exp_and_target_(
    logits_TV: Tensor, top_T: Tensor, target_T: Tensor, valid: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrites logits by exp(logits - top); returns (exponentials, sums [T], target logits -
    top).

    Columns from `valid` on are padding and become 0. Sums are float32 (float64 stays); exponentials
    of 16-bit logits, at most 1, are rounded to that dtype.
    """
    sums_T, targets_T = torch.empty_like(top_T), torch.empty_like(top_T)
    logits_TV[:, valid:] = 0
    if valid == 0:
        return logits_TV, sums_T.zero_(), targets_T.zero_()
    for rows in _row_blocks(logits_TV):
        block = logits_TV[rows, :valid]
        shifted = block.to(top_T.dtype).sub_(top_T[rows, None])
        targets_T[rows] = shifted.gather(1, target_T[rows, None])[:, 0]
        exps = shifted.exp_()
        torch.sum(exps, -1, out=sums_T[rows])
        if exps.dtype != block.dtype:
            block.copy_(exps)
    return logits_TV, sums_T, targets_T


def cross_entropy_backward_(
    exps_TV: Tensor, sums_T: Tensor, target_T: Tensor, owned_T: Tensor, grad_T: Tensor
) -> Tensor:
    """Overwrites the exponentials by the logits' gradient: (exps / sums - onehot) * grad.

    For float16 grad / sums stays in float32: with a large vocabulary and batch it would be
    subnormal in float16, and rounding it would shift a whole row.
    """
    factor_T = grad_T / sums_T
    if exps_TV.dtype != torch.float16:
        factor_T = factor_T.to(exps_TV.dtype)
    for rows in _row_blocks(exps_TV):
        exps_TV[rows].mul_(factor_T[rows, None])
    # scatter_ and scatter_add_ make a wide copy of all 16-bit exponentials.
    at_target = torch.arange(len(exps_TV), device=exps_TV.device), target_T
    exps_TV[at_target] -= grad_T.masked_fill(~owned_T, 0.0).to(exps_TV.dtype)
    return exps_TV


def row_parts_reference(
    logits_TV: Tensor, target_T: Tensor, valid: int, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, sum of exp(logits - maximum), target's logit), each [T] float32, over `valid`
    columns.

    A target of -1 is on another rank: its logit is 0. Without columns the maximum is -inf, the sum
    0.
    """
    top_T, sums_T, targets_T = logits_TV.new_zeros(3, len(logits_TV), dtype=_wide(logits_TV))
    if valid == 0:
        return top_T.fill_(float("-inf")), sums_T, targets_T
    for rows in _row_blocks(logits_TV):
        real = softcap(logits_TV[rows, :valid].to(_wide(logits_TV)), cap)
        top_T[rows] = row_max(real)
        targets_T[rows] = real.gather(1, target_T[rows, None].clamp(min=0))[:, 0]
        sums_T[rows] = (real - top_T[rows, None]).exp_().sum(-1)
    return top_T, sums_T, targets_T.masked_fill_(target_T < 0, 0.0)


def logits_gradient_reference(
    logits_TV: Tensor,
    lse_T: Tensor,
    target_T: Tensor,
    grad_T: Tensor,
    valid: int,
    cap: float = 0.0,
) -> Tensor:
    """(exp(logits - lse) - onehot) * grad; 0 in the columns from `valid` on."""
    capped_TV = softcap(logits_TV.to(lse_T.dtype), cap)
    p_TV = (capped_TV - lse_T[:, None]).exp()
    columns = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    p_TV -= (columns == target_T[:, None]).to(p_TV.dtype)
    if cap:
        p_TV *= softcap_slope(capped_TV, cap)
    return (p_TV * grad_T[:, None]).masked_fill(columns >= valid, 0.0).to(logits_TV.dtype)


# fmt: off
@kernel([{"BLOCK": block, "num_warps": warps}
         for block, warps in ((4096, 8), (8192, 8), (8192, 16), (16384, 16), (2048, 4))],
        key=["valid"])
def _row_parts(
    logits_ptr, target_ptr, top_ptr, sums_ptr, targets_ptr, width, valid, cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: on
    """Online softmax sums: a program reads one row."""
    row = tl.program_id(0).to(tl.int64)
    top, total = float("-inf"), 0.0
    for first in tl.range(0, valid, BLOCK, num_stages=2):
        column = first + tl.arange(0, BLOCK)
        # A mask by `valid`, of any length, hides that 16 bytes can be read at once.
        x = tl.load(logits_ptr + row * width + column, mask=column < width, other=float("-inf"))
        x = x.to(tl.float32)
        if CAPPED:
            x = cap * tanh(x / cap)
        x = tl.where(column < valid, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        # Where all are -inf so far, a shift by -inf would give NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
        top = higher
    target = tl.load(target_ptr + row)
    at = logits_ptr + row * width + tl.maximum(target, 0)
    tl.store(top_ptr + row, top)
    tl.store(sums_ptr + row, total)
    of_target = tl.load(at, mask=target >= 0, other=0.0).to(tl.float32)
    if CAPPED:
        of_target = cap * tanh(of_target / cap)
    tl.store(targets_ptr + row, of_target)


# fmt: off
@kernel([{"BLOCK": block, "num_warps": warps}
         for block, warps in ((4096, 8), (8192, 8), (2048, 4), (1024, 4))], key=["width"])
def _logits_gradient(
    logits_ptr, lse_ptr, target_ptr, grad_ptr, width, valid, cap, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: on
    """A program overwrites BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + row * width + column
    x = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
    share = 0.0
    if CAPPED:
        share = tanh(x / cap)
        x = cap * share
    p = tl.exp(x - tl.load(lse_ptr + row))
    p = tl.where(column == tl.load(target_ptr + row), p - 1.0, p)
    p = tl.where(column < valid, p, 0.0)
    if CAPPED:
        p *= 1.0 - share * share
    tl.store(at, p * tl.load(grad_ptr + row).to(tl.float32), mask=column < width)


def row_parts(
    logits_TV: Tensor, target_T: Tensor, valid: int, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`row_parts_reference` in one pass: T * V * itemsize bytes moved."""
    if not runs_triton(logits_TV):
        return row_parts_reference(logits_TV, target_T, valid, cap)
    return _row_parts_op(logits_TV, target_T, valid, cap)


def logits_gradient_(
    logits_TV: Tensor,
    lse_T: Tensor,
    target_T: Tensor,
    grad_T: Tensor,
    valid: int,
    cap: float = 0.0,
) -> Tensor:
    """Overwrites the logits by `logits_gradient_reference`: 2 * T * V * itemsize bytes moved."""
    if not runs_triton(logits_TV):
        gradient = logits_gradient_reference(logits_TV, lse_T, target_T, grad_T, valid, cap)
        return logits_TV.copy_(gradient)
    _logits_gradient_op(logits_TV, lse_T, target_T, grad_T, valid, cap)
    return logits_TV


def _three_columns(logits_TV: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    def column() -> Tensor:
        return logits_TV.new_empty(len(logits_TV), dtype=torch.float32)

    return column(), column(), column()


@custom_op(
    "cross_entropy_parts(Tensor logits, Tensor target, SymInt valid, float cap)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_three_columns,
)
def _row_parts_op(logits_TV, target_T, valid, cap):
    logits_TV, out = logits_TV.contiguous(), _three_columns(logits_TV)
    T, width = logits_TV.shape
    _row_parts[(T,)](logits_TV, target_T.contiguous(), *out, width, valid, cap, CAPPED=cap > 0)
    return out


@custom_op(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor lse, Tensor target, Tensor grad,"
    " SymInt valid, float cap) -> ()"
)
def _logits_gradient_op(logits_TV, lse_T, target_T, grad_T, valid, cap):
    assert logits_TV.is_contiguous(), "they are overwritten"
    T, width = logits_TV.shape
    rows = (lse_T.contiguous(), target_T.contiguous(), grad_T.contiguous())
    _logits_gradient[lambda meta: (T, cdiv(width, meta["BLOCK"]))](
        logits_TV, *rows, width, valid, cap, CAPPED=cap > 0
    )


def _row_blocks(x_TV: Tensor) -> list[slice]:
    row_bytes = x_TV.shape[1] * x_TV.element_size()
    step = limits.block_rows(row_bytes) if x_TV.device.type == "cpu" else len(x_TV)
    return limits.row_slices(len(x_TV), max(1, step))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
