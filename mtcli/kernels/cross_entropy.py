"""The local parts of softmax cross entropy, in place on the logits.

All work goes row block by row block, small enough that a block stays in the L2 cache between its
passes: on 2 cores, [4096, 8192] float32, forward and backward took 0.6 of the time of the same
passes over the whole tensor (benchmarks/bench_train.py measures the step they are part of).
"""

import torch
from torch import Tensor

BLOCK_BYTES = 2**20


def row_max(logits_TV: Tensor) -> Tensor:
    """The maximum of each row [T] in float32 (float64 stays); -inf for rows of no columns."""
    if logits_TV.shape[1] == 0:
        return logits_TV.new_full(logits_TV.shape[:1], float("-inf"), dtype=_wide(logits_TV))
    return logits_TV.amax(-1).to(_wide(logits_TV))


def exp_and_target_(
    logits_TV: Tensor, top_T: Tensor, target_T: Tensor, valid: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrites logits by exp(logits - top); returns (them, their sums [T], target logits - top).

    Columns from `valid` on are padding and become 0. Sums are float32 (float64 stays); for 16-bit
    logits the exponentials, at most 1, are kept in that dtype.
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

    In float16 grad / sums stays wide: of a large vocabulary and batch it would be subnormal, and
    rounding it would shift a whole row.
    """
    factor_T = grad_T / sums_T
    if exps_TV.dtype != torch.float16:
        factor_T = factor_T.to(exps_TV.dtype)
    for rows in _row_blocks(exps_TV):
        exps_TV[rows].mul_(factor_T[rows, None])
    at_target = exps_TV.gather(1, target_T[:, None])
    at_target -= grad_T.masked_fill(~owned_T, 0.0)[:, None].to(exps_TV.dtype)
    return exps_TV.scatter_(1, target_T[:, None], at_target)  # scatter_add_ widens 16 bits: 10x


def _row_blocks(x_TV: Tensor) -> list[slice]:
    row_bytes = x_TV.shape[1] * x_TV.element_size()
    step = max(1, BLOCK_BYTES // max(1, row_bytes)) if x_TV.device.type == "cpu" else len(x_TV)
    return [slice(i, min(i + step, len(x_TV))) for i in range(0, len(x_TV), max(1, step))]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
