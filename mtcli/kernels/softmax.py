"""Softmax of scaled scores, each query over the keys it sees.

b sequences, h heads, n queries, m keys.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtcli.kernels.launch import beats_torch, kernel, operator, power_of_two
from mtcli.kernels.tiles import WHOLE_ROWS, over_rows, whole_rows

if TYPE_CHECKING:
    import triton.language as tl

LONGEST = 32768  # keys of a row that one program holds


def masked_softmax_reference(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * scores [b, h, n, m]) where the mask [b or 1, 1, n, m] is True, 0 elsewhere.

    In float32 (float64 stays), returned in the scores' dtype. A query that sees nothing gets zeros.
    """
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide = wide if scale == 1.0 else wide * scale
    if mask is None:
        return wide.softmax(-1).to(scores.dtype)
    unseen = ~mask  # once, as both keep it for the backward
    p = wide.masked_fill(unseen, float("-inf")).softmax(-1)
    return p.masked_fill(unseen, 0.0).to(scores.dtype)


_tile = partial(whole_rows, elements=1024)


# fmt: off
@kernel(WHOLE_ROWS, key=["m"], default=_tile)
def _forward(
    scores_ptr, mask_ptr, out_ptr, rows, m, per_sequence, n, mask_b, scale,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: on
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]  # of b * h * n
    key = tl.arange(0, BLOCK)[None, :]
    seen = (row < rows) & (key < m)
    scores = tl.load(scores_ptr + row * m + key, mask=seen, other=0.0).to(tl.float32) * scale
    if MASKED:
        at = row // per_sequence * mask_b + row % n * m + key
        seen = seen & (tl.load(mask_ptr + at, mask=seen, other=0) != 0)
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.max(scores, 1)[:, None]
    exps = tl.exp(scores - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(exps, 1)[:, None]
    out = exps / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * m + key, out, mask=(row < rows) & (key < m))


# fmt: off
@kernel(WHOLE_ROWS, key=["m"], default=_tile)
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
    if not beats_torch("masked_softmax", scores, scores.shape[-1]) or scores.shape[-1] > LONGEST:
        return masked_softmax_reference(scores, mask, scale)
    return _softmax(scores, mask, scale)


def _run(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores, (b, h, n, m) = scores.contiguous(), scores.shape
    out, rows, masked = torch.empty_like(scores), b * h * n, mask is not None
    mask = mask.contiguous() if masked else scores
    facts = (rows, m, h * n, n, n * m if masked and len(mask) > 1 else 0, scale)
    _forward[over_rows(rows)](scores, mask, out, *facts, MASKED=masked, BLOCK=power_of_two(m))
    return out


def _run_backward(grad: Tensor, p: Tensor, scale: float) -> Tensor:
    grad, m, out = grad.contiguous(), p.shape[-1], torch.empty_like(p)
    rows = p.numel() // m
    _backward[over_rows(rows)](grad, p, out, rows, m, scale, BLOCK=power_of_two(m))
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[2]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _softmax_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


_softmax_backward = operator(
    "masked_softmax_backward(Tensor grad, Tensor p, float scale) -> Tensor",
    _run_backward,
    lambda grad, p, scale: torch.empty_like(p),
)
_softmax = operator(
    "masked_softmax(Tensor scores, Tensor? mask, float scale) -> Tensor",
    _run,
    lambda scores, *others: torch.empty_like(scores, memory_format=torch.contiguous_format),
    _gradient,
    _keep,
)
