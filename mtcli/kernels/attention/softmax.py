"""Masked softmax of scaled attention scores, for attention with dropout of probabilities.

b sequences, h heads, n queries, m keys.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.launch import (
    full_row_configs,
    kernel,
    power_of_two,
    prefers_kernel,
    row_grid,
)

if TYPE_CHECKING:
    import triton.language as tl

MAX_KEYS = 32768  # of a row that one program holds


def masked_softmax_reference(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * scores [b, h, n, m]) where the mask [b or 1, 1, n, m] is True, 0 elsewhere.

    In float32 (float64 stays), returned in the scores' dtype. A row that is False gets zeros.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide = wide if scale == 1.0 else wide * scale
    if mask is None:
        return wide.softmax(-1).to(scores.dtype)
    # Negated once, as both fills save it for backward.
    hidden = ~mask
    p = wide.masked_fill(hidden, float("-inf")).softmax(-1)
    return p.masked_fill(hidden, 0.0).to(scores.dtype)


_configs = partial(full_row_configs, elements=1024)


# fmt: off
@kernel(_configs, key=["m"])
def _forward(
    scores_ptr, mask_ptr, out_ptr, rows, m, per_sequence, n, mask_b, scale,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: on
    """Rows are b * h * n; `per_sequence` is h * n, `mask_b` the mask's stride of sequences."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    key = tl.arange(0, BLOCK)[None, :]
    visible = (row < rows) & (key < m)
    scores = tl.load(scores_ptr + row * m + key, mask=visible, other=0.0).to(tl.float32) * scale
    if MASKED:
        at = row // per_sequence * mask_b + row % n * m + key
        visible = visible & (tl.load(mask_ptr + at, mask=visible, other=0) != 0)
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.max(scores, 1)[:, None]
    exps = tl.exp(scores - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(exps, 1)[:, None]
    out = exps / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * m + key, out, mask=(row < rows) & (key < m))


# fmt: off
@kernel(_configs, key=["m"])
def _backward(
    grad_ptr, p_ptr, out_ptr, rows, m, scale, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: on
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    key = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (key < m)
    grad = tl.load(grad_ptr + row * m + key, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(p_ptr + row * m + key, mask=inside, other=0.0).to(tl.float32)
    out = p * (grad - tl.sum(grad * p, 1)[:, None]) * scale
    tl.store(out_ptr + row * m + key, out, mask=inside)


def masked_softmax(scores: Tensor, mask: Tensor | None, scale: float = 1.0) -> Tensor:
    """`masked_softmax_reference`, on a GPU in one pass over memory for up to 32768 keys.

    Bytes moved: 2 * b * h * n * m * itemsize and the mask forward, 3 backward.
    """
    keys = scores.shape[-1]
    if not prefers_kernel("masked_softmax", scores, keys) or keys > MAX_KEYS:
        return masked_softmax_reference(scores, mask, scale)
    return _masked_softmax(scores, mask, scale)


@custom_op(
    "masked_softmax(Tensor scores, Tensor? mask, float scale) -> Tensor",
    saved=lambda p, scores, mask, scale: (p, scale),
    backward=lambda grad, p, scale: _masked_softmax_backward(grad, p, scale),
)
def _masked_softmax(scores, mask, scale):
    scores, (b, h, n, m) = scores.contiguous(), scores.shape
    out, rows, masked = torch.empty_like(scores), b * h * n, mask is not None
    mask = mask.contiguous() if masked else scores
    sizes = (rows, m, h * n, n, n * m if masked and len(mask) > 1 else 0)
    _forward[row_grid(rows)](scores, mask, out, *sizes, scale, MASKED=masked, BLOCK=power_of_two(m))
    return out


@custom_op("masked_softmax_backward(Tensor grad, Tensor p, float scale) -> Tensor")
def _masked_softmax_backward(grad, p, scale):
    grad, m, out = grad.contiguous(), p.shape[-1], torch.empty_like(p)
    rows = p.numel() // m
    _backward[row_grid(rows)](grad, p, out, rows, m, scale, BLOCK=power_of_two(m))
    return out
