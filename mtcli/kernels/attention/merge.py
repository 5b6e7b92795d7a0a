"""Merges attention over two blocks of keys by their log-sum-exps, for ring attention.

b sequences, h query heads, n queries, d head width. A query that attends to no key of a block has
the log-sum-exp -inf there, and the merge with that block changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels.attention.tiles import contiguous_rows, head_grid, program_of, strides
from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import kernel, power_of_two, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

CONFIGS = tuple({"ROWS": rows, "num_warps": warps} for rows, warps in ((16, 4), (32, 4), (64, 8)))


def merge_reference_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges a block's result [b, h, n, d] and log-sum-exp [b, h, n] into `out` and `lse`.

    `out` and `lse` are float32 or wider.
    """
    total = torch.logaddexp(lse, part_lse)
    safe = finite(total)
    out.mul_((lse - safe).exp_()[..., None])
    out.add_(part.to(out.dtype) * (part_lse - safe).exp_()[..., None])
    lse.copy_(total)


def finite(lse: Tensor) -> Tensor:
    """lse with the lowest finite number for -inf: then -inf - finite(-inf) is -inf, and not NaN."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


@kernel(CONFIGS, key=["d"])
def _merge(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, h, n, d, ob: tl.int64, oh: tl.int64, on,
    lb: tl.int64, lh: tl.int64, pb: tl.int64, ph: tl.int64, pn, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Strides are those of out, lse and part; part_lse [b, h, n] is contiguous."""
    tile, b, head = program_of(n, h, ROWS)
    row = tile * ROWS + tl.arange(0, ROWS)
    real, column = row < n, tl.arange(0, WIDTH)[None, :]
    lse_at = lse_ptr + b * lb + head * lh + row
    lse = tl.load(lse_at, mask=real, other=0.0)
    part_lse = tl.load(part_lse_ptr + (b * h + head) * n + row, mask=real, other=0.0)
    # Every warp reads lse; none may overwrite it before all have.
    tl.debug_barrier()
    top = tl.maximum(lse, part_lse)
    base = tl.where(top == float("-inf"), 0.0, top)
    share, part_share = tl.exp(lse - base), tl.exp(part_lse - base)
    total = share + part_share
    divisor = tl.where(total > 0.0, total, 1.0)
    tl.store(lse_at, tl.where(total > 0.0, base + tl.log(divisor), top), mask=real)
    inside, long = real[:, None] & (column < d), row.to(tl.int64)[:, None]
    out_at = out_ptr + b * ob + head * oh + long * on + column
    part_at = part_ptr + b * pb + head * ph + long * pn + column
    out = tl.load(out_at, mask=inside, other=0.0) * (share / divisor)[:, None]
    part = tl.load(part_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, out + part * (part_share / divisor)[:, None], mask=inside)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`merge_reference_`, on a GPU in one pass: b h n d (8 + part's itemsize) bytes moved."""
    if runs_triton(out):
        _merge_op(out, lse, part, part_lse)
    else:
        merge_reference_(out, lse, part, part_lse)


@custom_op("merge_(Tensor(a!) out, Tensor(b!) lse, Tensor part, Tensor part_lse) -> ()")
def _merge_op(out, lse, part, part_lse):
    part, part_lse, (b, h, n, d) = contiguous_rows(part), part_lse.contiguous(), out.shape
    assert lse.stride(2) == 1, f"strides {lse.stride()}"
    layout = (*strides(out), *lse.stride()[:2], *strides(part))
    _merge[head_grid(n, b * h)](out, lse, part, part_lse, h, n, d, *layout, WIDTH=power_of_two(d))
