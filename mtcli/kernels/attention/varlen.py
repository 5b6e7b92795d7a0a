"""Attention of packed documents by torch's FlashAttention, which takes the first token of each.

The operators are those of torch.nn.attention.varlen, equal in torch 2.11 to 2.13. T tokens of all
rows, h query heads, g key-value groups (g divides h), d head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import runs_triton

MAX_HEAD_DIM = 256
_aten = torch.ops.aten


class PackedDocuments(NamedTuple):
    """The documents of all rows, one after another, as the host knows them.

    `starts` are followed by T, up to a power of two of documents: the last ones are empty, and
    tensors have few sizes.
    """

    starts: Tensor  # [N + 1] int32: the first token of each
    longest: int  # tokens


def takes_documents(q: Tensor) -> bool:
    """Whether FlashAttention takes documents of heads like q's [..., d].

    It takes 16 bits, in rows of a multiple of 16 bytes, from compute capability 8.0 on. Its
    backward sums in any order, and a graph would be compiled anew for each longest document.
    """
    fits = q.element_size() == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= MAX_HEAD_DIM
    if torch.compiler.is_compiling() or not (fits and runs_triton(q)):
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    if not q.is_cuda:
        return True
    recent = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return recent and torch.backends.cuda.is_flash_attention_available()


def packed_sdpa(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments, left: int | None, right: int | None
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v within documents: [b, h, s, d], k and v [b, g, s, d].

    A query attends to `left` keys before itself and `right` after, or to all where that is None.
    """
    tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [T, heads, d]
    window = (-1 if n is None else n for n in (left, right))
    out, _ = _document_flash(*tokens, *packed, *window)
    return out.unflatten(0, (len(q), -1)).transpose(1, 2)


@custom_op(
    "document_flash(Tensor q, Tensor k, Tensor v, Tensor starts, int longest, int left, int right)"
    " -> (Tensor, Tensor)",
    fake=lambda q, *inputs: (
        q.new_empty(q.shape),
        q.new_empty(q.shape[1], len(q), dtype=torch.float32),
    ),
    saved=lambda outputs, *inputs: (*inputs[:3], *outputs, *inputs[3:]),
    backward=lambda grad, _, *saved: _document_flash_backward(grad, *saved),
)
def _document_flash(q, k, v, starts, longest, left, right):
    """(output [T, h, d], log-sum-exp [h, T]) of q [T, h, d], k and v [T, g, d]."""
    sizes, causal = (starts, starts, longest, longest), (left, right) == (-1, 0)
    window = {"window_size_left": left, "window_size_right": right}
    out, lse, *_ = _aten._flash_attention_forward(q, k, v, *sizes, 0.0, causal, False, **window)
    return out, lse


@custom_op(
    "document_flash_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor starts, int longest, int left, int right) -> (Tensor, Tensor, Tensor)",
    fake=lambda grad, q, k, v, *inputs: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)
def _document_flash_backward(grad, q, k, v, out, lse, starts, longest, left, right):
    sizes, causal = (starts, starts, longest, longest), (left, right) == (-1, 0)
    window = {"window_size_left": left, "window_size_right": right}
    no_dropout = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)
    return _aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse, *sizes, 0.0, causal, *no_dropout, **window
    )
