"""Rotary embedding of queries and keys (arXiv:2104.09864), half-split as Hugging Face's Llama.

b sequences of s tokens, h query and g key heads, d head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels.attention.tiles import contiguous_rows, empty_by_token, strides
from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import cdiv, kernel, power_of_two, runs_triton

if TYPE_CHECKING:
    import triton.language as tl


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs of dimensions i and i + d / 2 of x [b, h, s, d].

    cos and sin [b, 1, s, d] have each angle's value twice.
    """
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


# fmt: off
@kernel()
def _rotate_heads(
    x_ptr, out_ptr, heads, first, cos, sin, x_stride, out_stride,
    HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: on
    """Rotates heads `first` .. `first + HEADS - 1` of one token."""
    head = (first + tl.arange(0, HEADS))[:, None]
    lane = tl.arange(0, LANES)[None, :]
    inside = (head < heads) & (lane < HALF)
    at = x_ptr + head.to(tl.int64) * x_stride + lane
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = out_ptr + head.to(tl.int64) * out_stride + lane
    tl.store(to, low * cos - high * sin, mask=inside)
    tl.store(to + HALF, high * cos + low * sin, mask=inside)


def _config(half: int) -> dict[str, int]:
    """A program of 16 heads, with 8 elements per thread: 16 bytes of 16-bit numbers."""
    return {"HEADS": 16, "num_warps": max(1, min(8, 16 * power_of_two(half) // 256))}


# fmt: off
@kernel([{"HEADS": heads, "num_warps": warps} for heads in (16, 8, 32) for warps in (4, 2, 1)],
        key=["HALF"], default=_config)
def _rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, s, h, g, sign,
    q_b, q_h, q_s, k_b, k_h, k_s,
    HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: on
    """A program rotates HEADS heads of q or k of one token, of b * s."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // s, token % s
    lane = tl.arange(0, LANES)[None, :]
    angle = token * 2 * HALF + lane
    cos = tl.load(cos_ptr + angle, mask=lane < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=lane < HALF, other=0.0).to(tl.float32) * sign
    block, of_q = tl.program_id(1), (h + HEADS - 1) // HEADS
    if block < of_q:
        x, out = q_ptr + b * q_b + t * q_s, q_out_ptr + token * h * 2 * HALF
        _rotate_heads(x, out, h, block * HEADS, cos, sin, q_h, 2 * HALF, HALF, LANES, HEADS)
    else:
        x, out = k_ptr + b * k_b + t * k_s, k_out_ptr + token * g * 2 * HALF
        first = (block - of_q) * HEADS
        _rotate_heads(x, out, g, first, cos, sin, k_h, 2 * HALF, HALF, LANES, HEADS)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate_reference` of q [b, h, s, d] and k [b, g, s, d], on a GPU in one launch.

    Results are laid out as [b, s, heads, d]. Bytes moved in each direction: 2 * b * s * (h + g) * d
    * itemsize, and the cosines and sines.
    """
    if not runs_triton(q):
        return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
    return _rotate_op(q, k, cos, sin, False)


# A rotation's transpose is the rotation back; angles get no gradient.
@custom_op(
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor)",
    fake=lambda q, k, *inputs: (empty_by_token(q), empty_by_token(k)),
    saved=lambda outputs, q, k, cos, sin, back: (cos, sin, back),
    backward=lambda of_q, of_k, cos, sin, back: _rotate_op(of_q, of_k, cos, sin, not back),
)
def _rotate_op(q, k, cos, sin, back):
    q, k = contiguous_rows(q), contiguous_rows(k)
    cos, sin = cos.contiguous(), sin.contiguous()
    (b, h, s, d), g = q.shape, k.shape[1]
    out = empty_by_token(q), empty_by_token(k)
    grid = lambda meta: (b * s, cdiv(h, meta["HEADS"]) + cdiv(g, meta["HEADS"]))  # noqa: E731
    layout, sign = (*strides(q), *strides(k)), -1.0 if back else 1.0
    _rotate[grid](q, k, cos, sin, *out, s, h, g, sign, *layout, d // 2, power_of_two(d // 2))
    return out
