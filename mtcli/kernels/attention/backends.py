"""Orders the backends of scaled_dot_product_attention on a GPU, by whether shapes repeat.

torch's own order depends on the version of cuDNN and on environment variables. cuDNN is the fastest
on Hopper (1.7 times FlashAttention forward on an H200, 1.6 backward), but it builds a plan for each
new shape, 20 to 400 ms of the host: a training step repeats its shapes, while each token of a
generated text and each batch of an evaluation has its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

PLANNING = "CUDNN_ATTENTION"
OTHERS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
NAMES = {PLANNING: "cuDNN", "FLASH_ATTENTION": "FlashAttention"}
NAMES |= {"EFFICIENT_ATTENTION": "memory-efficient attention", "MATH": "plain GEMMs"}
_repeats: ContextVar[bool] = ContextVar("repeats", default=True)


def sdpa_order(capability: tuple[int, int], repeats: bool) -> tuple[str, ...]:
    """The backends, first the one to take where it can, for shapes that repeat or do not."""
    if not repeats:
        return OTHERS
    # Hopper and the Blackwell of data centres, as torch's own order; elsewhere cuDNN is a fallback.
    if capability in ((9, 0), (10, 0)):
        return PLANNING, *OTHERS
    return *OTHERS[:2], PLANNING, OTHERS[2]


@contextmanager
def sdpa_backends(device: torch.device, repeats: bool) -> Iterator[None]:
    """Has torch take `sdpa_order`'s backends inside; on a CPU nothing changes."""
    if device.type != "cuda":
        yield
        return
    # Not at the top: it takes 10 ms, and a CPU needs none of it.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = sdpa_order(torch.cuda.get_device_capability(device), repeats)
    token = _repeats.set(repeats)
    try:
        with sdpa_kernel([getattr(SDPBackend, name) for name in order], set_priority=True):
            yield
    finally:
        _repeats.reset(token)


def shapes_repeat() -> bool:
    """Whether a plan that is built for a shape is used again: outside of `sdpa_backends`, yes."""
    return torch.compiler.is_compiling() or _repeats.get()


def backend_name(q: Tensor, k: Tensor, causal: bool) -> str:
    """The backend that torch takes now, for q [b, h, n, d], and k and v [b, g, n, d]."""
    from torch.nn.attention import SDPBackend

    grouped = q.shape[1] != k.shape[1]
    number = torch._fused_sdp_choice(q, k, k, is_causal=causal, enable_gqa=grouped)
    return next(text for name, text in NAMES.items() if getattr(SDPBackend, name).value == number)
