"""Masked softmax of attention scores with dropout of the probabilities, in one pass.

b sequences, h heads of this rank, n queries, m keys. On a GPU the backward recomputes probabilities
and dropout's mask from the scores, so neither is saved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.random import keep_rows, keeps
from mtcli.kernels.triton_launch import cdiv, full_row_configs, kernel, power_of_two, prefers_kernel

if TYPE_CHECKING:
    import triton.language as tl

MAX_KEYS = 16384  # of a row that one program holds in registers


class ScoreDropout(NamedTuple):
    """Dropout of attention probabilities, as a function of (query token, head, key position).

    Random number (token * heads + head) * m + key of the stream decides, so no layout changes the
    mask. In an array of models `key` and `drop` are tensors [b, 1, 1, 1], int64 and float64, of
    each sequence's model.
    """

    numbers: Tensor  # the query tokens' global indices [b, n]
    heads: int  # of the whole model
    first_head: int  # of this rank
    key: int | Tensor
    drop: float | Tensor

    def factors(self, scores: Tensor) -> Tensor:
        """0 with probability `drop`, else 1 / (1 - drop), in the shape and dtype of scores."""
        heads = torch.arange(scores.shape[1], device=scores.device) + self.first_head
        rows = self.numbers[:, None, :] * self.heads + heads[None, :, None]
        keys = scores.shape[-1]
        keep = keep_rows(self.key, rows * keys, keys, self.drop)
        return keep.to(scores.dtype).div_(1.0 - self.drop)


def masked_softmax_reference(scores: Tensor, mask: Tensor | None, dropout: ScoreDropout) -> Tensor:
    """dropout(softmax(scores [b, h, n, m])) over the keys where the mask [b or 1, 1, n, m] is True.

    Computed in float32 (float64 stays), returned in the scores' dtype. A row without True is zero.
    """
    return _softmax(scores, mask) * dropout.factors(scores)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is None:
        return wide.softmax(-1).to(scores.dtype)
    # Negated once, as both fills save it for backward.
    hidden = ~mask
    p = wide.masked_fill(hidden, float("-inf")).softmax(-1)
    return p.masked_fill(hidden, 0.0).to(scores.dtype)


_configs = partial(full_row_configs, elements=1024)


@kernel()
def _rows(
    scores_ptr, mask_ptr, numbers_ptr, n, m, h, mask_b, heads, first_head, key, threshold,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(row, whether it exists) of ROWS queries of a head; (offset, whether it exists, the score or
    -inf, whether it is kept) of their elements."""
    of_head, column = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    query = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    sequence, head, row = of_head // h, of_head % h, of_head.to(tl.int64) * n + query
    inside = (query < n) & (column < m)
    scores = tl.load(scores_ptr + row * m + column, mask=inside, other=0.0).to(tl.float32)
    visible = inside
    if MASKED:
        at = sequence.to(tl.int64) * mask_b + query * m + column
        visible = inside & (tl.load(mask_ptr + at, mask=inside, other=0) != 0)
    token = tl.load(numbers_ptr + sequence * n + query, mask=query < n, other=0)
    keep = keeps(key, (token * heads + first_head + head) * m, column, threshold)
    return row, query < n, row * m + column, inside, tl.where(visible, scores, float("-inf")), keep


# fmt: off
@kernel(_configs, key=["m"])
def _forward(
    scores_ptr, mask_ptr, numbers_ptr, out_ptr, lse_ptr, n, m, h, mask_b, heads, first_head,
    key: tl.int64, threshold: tl.int64, scale,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: on
    """`mask_b` is the mask's stride of sequences, scale 1 / (1 - drop)."""
    row, exists, at, inside, scores, keep = _rows(
        scores_ptr, mask_ptr, numbers_ptr, n, m, h, mask_b, heads, first_head, key, threshold,
        MASKED, BLOCK, ROWS,
    )  # fmt: skip
    top = tl.max(scores, 1)[:, None]
    top = tl.where(top == float("-inf"), 0.0, top)
    exps = tl.exp(scores - top)
    total = tl.sum(exps, 1)[:, None]
    out = tl.where(keep, exps * (scale / tl.where(total == 0.0, 1.0, total)), 0.0)
    tl.store(out_ptr + at, out, mask=inside)
    tl.store(lse_ptr + row, top + tl.log(total), mask=exists)


# fmt: off
@kernel(_configs, key=["m"])
def _backward(
    grad_ptr, scores_ptr, mask_ptr, numbers_ptr, lse_ptr, out_ptr, n, m, h, mask_b, heads,
    first_head, key: tl.int64, threshold: tl.int64, scale,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: on
    row, exists, at, inside, scores, keep = _rows(
        scores_ptr, mask_ptr, numbers_ptr, n, m, h, mask_b, heads, first_head, key, threshold,
        MASKED, BLOCK, ROWS,
    )  # fmt: skip
    lse = tl.load(lse_ptr + row, mask=exists, other=0.0)
    p = tl.exp(scores - tl.where(lse == float("-inf"), 0.0, lse))
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.where(keep, grad * scale, 0.0)
    tl.store(out_ptr + at, p * (grad - tl.sum(grad * p, 1)[:, None]), mask=inside)


def masked_softmax(scores: Tensor, mask: Tensor | None, dropout: ScoreDropout) -> Tensor:
    """`masked_softmax_reference`, on a GPU in one pass over memory for up to 16384 keys.

    Bytes moved: 2 * b * h * n * m * itemsize and the mask forward, 3 and the mask backward.
    """
    keys = scores.shape[-1]
    of_many = isinstance(dropout.key, Tensor)
    if of_many or not prefers_kernel("masked_softmax", scores, keys) or keys > MAX_KEYS:
        return masked_softmax_reference(scores, mask, dropout)
    return _masked_softmax(scores, mask, *dropout)[0]


def _out_and_lse(scores: Tensor, *inputs: object) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    return out, scores.new_empty(scores.shape[:-1], dtype=torch.float32)


@custom_op(
    "masked_softmax(Tensor scores, Tensor? mask, Tensor numbers, int heads, int first_head,"
    " int key, float drop) -> (Tensor, Tensor)",
    fake=_out_and_lse,
    saved=lambda outputs, scores, *inputs: (scores, outputs[1], *inputs),
    backward=lambda grad, _, *saved: _masked_softmax_backward(grad, *saved),
)
def _masked_softmax(scores, mask, numbers, *dropout):
    out, lse = _out_and_lse(scores)
    _launch(_forward, (), scores.contiguous(), mask, numbers, (out, lse), dropout)
    return out, lse


@custom_op(
    "masked_softmax_backward(Tensor grad, Tensor scores, Tensor lse, Tensor? mask, Tensor numbers,"
    " int heads, int first_head, int key, float drop) -> Tensor",
)
def _masked_softmax_backward(grad, scores, lse, mask, numbers, *dropout):
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    first = (grad.contiguous(),)
    _launch(_backward, first, scores.contiguous(), mask, numbers, (lse, out), dropout)
    return out


def _launch(kernel, first, scores, mask, numbers, last, dropout):
    (b, h, n, m), masked, (heads, first_head, key, drop) = scores.shape, mask is not None, dropout
    mask = mask.contiguous() if masked else scores
    sizes = (n, m, h, n * m if masked and len(mask) > 1 else 0, heads, first_head)
    kernel[lambda meta: (b * h, cdiv(n, meta["ROWS"]))](
        *first, scores, mask, numbers.contiguous(), *last, *sizes,
        key, round(drop * 2**32), 1.0 / (1.0 - drop), MASKED=masked, BLOCK=power_of_two(m),
    )  # fmt: skip
