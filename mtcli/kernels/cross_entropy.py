"""One rank's share of softmax cross entropy over a sharded vocabulary, in place on the logits.

On a GPU `losses_and_gradient_` reads the logits once and overwrites them by their gradient: 2 * T *
V * itemsize bytes moved. Its programs read a row twice, the second time from the L2 cache: at
50,304 columns two on each of 132 SMs take 27 of an H100's 50 MB, and at 128,256 one takes 34. Ranks
that share rows exchange `row_parts` ahead of `logits_gradient_`: 3 * T * V * itemsize bytes. On
CPU, where computing an exponential costs more than storing it, the forward overwrites logits by
exponentials, and the backward those by gradients.

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
from mtcli.kernels.triton_launch import cdiv, kernel, multiprocessors, runs_triton

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


@kernel()
def _add_block(
    row_ptr, first, top, total, width, valid, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """(maximum, sum of exponentials over it) of a row, with BLOCK columns more."""
    column = first + tl.arange(0, BLOCK)
    # A mask by `valid`, of any length, hides that 16 bytes can be read at once.
    x = tl.load(row_ptr + column, mask=column < width, other=float("-inf")).to(tl.float32)
    if CAPPED:
        x = cap * tanh(x / cap)
    x = tl.where(column < valid, x, float("-inf"))
    higher = tl.maximum(top, tl.max(x, 0))
    # Where all are -inf so far, a shift by -inf would give NaN.
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)


@kernel()
def _overwrite(
    row_ptr, first, lse, target, grad, width, valid, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Overwrites BLOCK logits of a row by their gradient."""
    column = first + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    share = 0.0
    if CAPPED:
        share = tanh(x / cap)
        x = cap * share
    p = tl.exp(x - lse)
    p = tl.where(column == target, p - 1.0, p)
    p = tl.where(column < valid, p, 0.0)
    if CAPPED:
        p *= 1.0 - share * share
    tl.store(row_ptr + column, p * grad, mask=column < width)


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
    row_ptr, top, total = logits_ptr + row * width, float("-inf"), 0.0
    for first in tl.range(0, valid, BLOCK, num_stages=2):
        top, total = _add_block(row_ptr, first, top, total, width, valid, cap, CAPPED, BLOCK)
    target = tl.load(target_ptr + row)
    at = row_ptr + tl.maximum(target, 0)
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
    lse, target = tl.load(lse_ptr + row), tl.load(target_ptr + row)
    row_ptr, grad = logits_ptr + row * width, tl.load(grad_ptr + row).to(tl.float32)
    first = tl.program_id(1) * BLOCK
    _overwrite(row_ptr, first, lse, target, grad, width, valid, cap, CAPPED, BLOCK)


PER_SM = tuple(
    {"BLOCK": block, "PER_SM": programs, "num_warps": 32 // programs}
    for block, programs in ((8192, 2), (16384, 1), (4096, 2), (8192, 1))
)


# fmt: off
@kernel(PER_SM, key=["valid"], default=lambda valid: PER_SM[valid > 65536])
def _losses_and_gradient(
    logits_ptr, target_ptr, grad_ptr, losses_ptr, rows, width, valid, cap, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr, PER_SM: tl.constexpr,
):  # fmt: on
    """A program reads a row forwards for its sums, and backwards for what it gives."""
    blocks = (width + BLOCK - 1) // BLOCK
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        at, target = logits_ptr + row * width, tl.load(target_ptr + row)
        # Ahead of the barriers of the sums, after which the row is overwritten.
        of_target = tl.load(at + tl.maximum(target, 0)).to(tl.float32)
        if CAPPED:
            of_target = cap * tanh(of_target / cap)
        top, total = float("-inf"), 0.0
        for first in tl.range(0, valid, BLOCK, num_stages=2):
            top, total = _add_block(at, first, top, total, width, valid, cap, CAPPED, BLOCK)
        lse = top + tl.log(total)
        tl.store(losses_ptr + row, lse - of_target)
        grad = tl.load(grad_ptr + row).to(tl.float32)
        for block in range(0, blocks):
            first = (blocks - 1 - block) * BLOCK
            _overwrite(at, first, lse, target, grad, width, valid, cap, CAPPED, BLOCK)


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


def losses_and_gradient_(
    logits_TV: Tensor, target_T: Tensor, grad_T: Tensor, valid: int, cap: float = 0.0
) -> Tensor:
    """The cross entropy of each target [T] float32; overwrites the logits by
    `logits_gradient_reference`. 2 * T * V * itemsize bytes moved."""
    if not runs_triton(logits_TV):
        top_T, sums_T, targets_T = row_parts_reference(logits_TV, target_T, valid, cap)
        lse_T = top_T + sums_T.log()
        logits_gradient_(logits_TV, lse_T, target_T, grad_T, valid, cap)
        return lse_T - targets_T
    return _losses_and_gradient_op(logits_TV, target_T, grad_T, valid, cap)


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


@custom_op(
    "cross_entropy_with_gradient_(Tensor(a!) logits, Tensor target, Tensor grad, SymInt valid,"
    " float cap) -> Tensor",
    fake=lambda logits_TV, *inputs: logits_TV.new_empty(len(logits_TV), dtype=torch.float32),
)
def _losses_and_gradient_op(logits_TV, target_T, grad_T, valid, cap):
    assert logits_TV.is_contiguous(), "they are overwritten"
    T, width = logits_TV.shape
    losses_T = logits_TV.new_empty(T, dtype=torch.float32)
    pointers = (logits_TV, target_T.contiguous(), grad_T.contiguous(), losses_T)
    programs = multiprocessors(logits_TV)
    _losses_and_gradient[lambda meta: (min(T, programs * meta["PER_SM"]),)](
        *pointers, T, width, valid, cap, CAPPED=cap > 0
    )
    return losses_T


def _row_blocks(x_TV: Tensor) -> list[slice]:
    row_bytes = x_TV.shape[1] * x_TV.element_size()
    step = limits.block_rows(row_bytes) if x_TV.device.type == "cpu" else len(x_TV)
    return limits.row_slices(len(x_TV), max(1, step))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
