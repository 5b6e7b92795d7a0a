"""Attention with its log-sum-exp by the libraries in torch: FlashAttention, and cuDNN's.

The operators are those that scaled_dot_product_attention calls, equal in torch 2.11 to 2.13. Given
output and log-sum-exp over all keys, their backwards return the gradients of a block of keys. They
sum the gradient of queries atomically, so its last bits differ from run to run.
b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.attention.backends import shapes_repeat
from mtcli.kernels.autotune import fastest_backend

# Between these numbers of keys the fastest backend is measured.
MIN_KEYS, MAX_KEYS = 1024, 16384

_aten = torch.ops.aten
Grads = tuple[Tensor, Tensor, Tensor]


class AttentionLibrary(NamedTuple):
    """A library's forward and backward, with the signatures of attention.py, without a mask."""

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, tuple[Tensor, ...], Tensor, bool], Grads]
    max_head_dim: int
    name: str


def library_for(op: str, q: Tensor, k: Tensor) -> AttentionLibrary | None:
    """The library measured to be fastest for "attention" or "attention_backward".

    Without a measurement: cuDNN from compute capability 9.0 on, else FlashAttention, and the Triton
    kernel under torch.use_deterministic_algorithms. FlashAttention stands in for cuDNN where shapes
    do not repeat. None is the Triton kernel, which also takes what no library does.
    """
    best = fastest_backend(op, q, tuned_sizes(k.shape[2], q.shape[3]))
    if best is None and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        narrow = q.shape[3] <= LIBRARIES["cudnn"].max_head_dim
        hopper = torch.cuda.get_device_capability(q.device) >= (9, 0)
        best = "cudnn" if narrow and hopper else "flash"
    if best == "cudnn" and not shapes_repeat():
        best = "flash"
    # They take 16 bits, in rows of a multiple of 16 bytes.
    library, fits = LIBRARIES.get(best), q.element_size() == 2 and q.shape[3] % 8 == 0
    return library if library and fits and q.shape[3] <= library.max_head_dim else None


def tuned_sizes(keys: int, d: int) -> tuple[int, int]:
    """(keys, head width) in the autotune table, with keys clamped to the measured range."""
    return min(max(keys, MIN_KEYS), MAX_KEYS), d


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
    lse = lse.unsqueeze(-1) if _cudnn_lse_dims(q.device, q.dtype) == 4 else lse
    lengths = (None, None, q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, offset, None, *lengths, 0.0, causal
    )


@cache
def _cudnn_lse_dims(device: torch.device, dtype: torch.dtype) -> int:
    """The number of dimensions, 3 or 4 by torch's version, of cuDNN's log-sum-exp."""
    x = torch.empty(1, 1, 64, 64, device=device, dtype=dtype)
    return _aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].dim()


def _no_dropout(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Dummies for dropout's seed and offset."""
    return torch.empty(2, device=device, dtype=dtype), torch.empty((), device=device, dtype=dtype)


LIBRARIES: dict[Any, AttentionLibrary] = {
    "flash": AttentionLibrary(_flash, _flash_backward, 256, "FlashAttention"),
    "cudnn": AttentionLibrary(_cudnn, _cudnn_backward, 128, "cuDNN"),
}
