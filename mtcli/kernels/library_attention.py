"""Attention with its log-sum-exp by torch's libraries: FlashAttention, and cuDNN's.

They are the operators below scaled_dot_product_attention, the same in torch 2.11 to 2.13. Given
output and log-sum-exp over all keys, their backward passes too give the part of a block of keys.
They add up the gradient of queries atomically: its last bits differ from run to run.
b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.choices import fastest

MIN_KEYS, MAX_KEYS = 1024, 16384  # keys between which the choice is measured

_aten = torch.ops.aten
Grads = tuple[Tensor, Tensor, Tensor]


class Library(NamedTuple):
    """A library's passes, as `attention` and `attention_backward` have them, without a mask."""

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, tuple[Tensor, ...], Tensor, bool], Grads]
    max_head_dim: int


def library_for(op: str, q: Tensor, k: Tensor) -> Library | None:
    """Which library was measured to be faster than ours in an op ("attention" or its "_backward");
    None where none was, or where it does not take such heads."""
    library = LIBRARIES.get(fastest(op, q, magnitudes(k.shape[2], q.shape[3])))
    return library if library is not None and takes(library, q) else None


def magnitudes(keys: int, d: int) -> tuple[int, int]:
    """What a choice depends on: the head's width, and the keys as far as that was measured."""
    return min(max(keys, MIN_KEYS), MAX_KEYS), d


def takes(library: Library, q: Tensor) -> bool:
    """Whether a library multiplies such heads: 16 bits, rows of a multiple of 16 bytes."""
    return q.element_size() == 2 and q.shape[3] % 8 == 0 and q.shape[3] <= library.max_head_dim


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(grad: Tensor, saved: tuple[Tensor, ...], lse: Tensor, causal: bool) -> Grads:
    q, k, v, out = saved
    seed, offset = _no_dropout(q.device, torch.uint64)
    lengths = (None, None, q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, seed, offset
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(grad: Tensor, saved: tuple[Tensor, ...], lse: Tensor, causal: bool) -> Grads:
    q, k, v, out = saved
    seed, offset = _no_dropout(q.device, torch.int64)
    lse = lse.contiguous()
    lse = lse.unsqueeze(-1) if _cudnn_sums_dims(q.device, q.dtype) == 4 else lse
    lengths = (None, None, q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, causal
    )


@cache
def _cudnn_sums_dims(device: torch.device, dtype: torch.dtype) -> int:
    """3 or 4, by torch's version: the dimensions of the log-sum-exp, in the backward pass too."""
    x = torch.empty(1, 1, 64, 64, device=device, dtype=dtype)
    return _aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].dim()


def _no_dropout(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A random state, which nobody reads where nothing is dropped."""
    return torch.empty(2, device=device, dtype=dtype), torch.empty((), device=device, dtype=dtype)


LIBRARIES: dict[Any, Library] = {
    "flash": Library(_flash, _flash_backward, 256),
    "cudnn": Library(_cudnn, _cudnn_backward, 128),
}
