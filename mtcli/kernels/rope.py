"""Rotary embedding of queries and keys (arXiv:2104.09864), half-split as Hugging Face's Llama.

b sequences of s tokens, h query and g key heads, d head width.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtcli.kernels.attention.tiles import contiguous_rows, empty_by_token
from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.grouped_gemm import multiple, units
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
    x_ptr, out_ptr, heads, first, cos, sin, members, of_group, of_member, out_group, out_member,
    HALF: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: on
    """Rotates heads `first` .. `first + HEADS - 1` of one token; a group has `members` of them."""
    head = (first + tl.arange(0, HEADS))[:, None]
    lane = tl.arange(0, LANES)[None, :]
    inside = (head < heads) & (lane < HALF)
    group, member = (head // members).to(tl.int64), (head % members).to(tl.int64)
    at = x_ptr + group * of_group + member * of_member + lane
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = out_ptr + group * out_group + member * out_member + lane
    tl.store(to, low * cos - high * sin, mask=inside)
    tl.store(to + HALF, high * cos + low * sin, mask=inside)


def _config(half: int) -> dict[str, int]:
    """A program of 16 heads, with 8 elements per thread: 16 bytes of 16-bit numbers."""
    return {"HEADS": 16, "num_warps": max(1, min(8, 16 * power_of_two(half) // 256))}


# fmt: off
@kernel([{"HEADS": heads, "num_warps": warps} for heads in (16, 8, 32) for warps in (4, 2, 1)],
        key=["HALF"], default=_config)
def _rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, s, h, g, members, sign,
    q_b, q_s, q_g, q_r, k_b, k_s, k_g, q_out_t, q_out_g, q_out_r, k_out_t, k_out_g,
    HALF: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: on
    """A program rotates HEADS heads of q or k of one token, of b * s; UNIT divides all strides."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // s, token % s
    lane = tl.arange(0, LANES)[None, :]
    angle = token * 2 * HALF + lane
    cos = tl.load(cos_ptr + angle, mask=lane < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=lane < HALF, other=0.0).to(tl.float32) * sign
    block, of_q = tl.program_id(1), (h + HEADS - 1) // HEADS
    if block < of_q:
        x = q_ptr + b * multiple(q_b, UNIT) + t * multiple(q_s, UNIT)
        out, first = q_out_ptr + token * multiple(q_out_t, UNIT), block * HEADS
        _rotate_heads(
            x, out, h, first, cos, sin, members, multiple(q_g, UNIT), multiple(q_r, UNIT),
            multiple(q_out_g, UNIT), multiple(q_out_r, UNIT), HALF, LANES, HEADS
        )  # fmt: skip
    else:
        x = k_ptr + b * multiple(k_b, UNIT) + t * multiple(k_s, UNIT)
        out, first = k_out_ptr + token * multiple(k_out_t, UNIT), (block - of_q) * HEADS
        _rotate_heads(
            x, out, g, first, cos, sin, 1, multiple(k_g, UNIT), 0,
            multiple(k_out_g, UNIT), 0, HALF, LANES, HEADS
        )  # fmt: skip


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
    out = empty_by_token(q), empty_by_token(k)
    by_token = (x.transpose(1, 2) for x in (q, k, *out))
    q, k, q_out, k_out = by_token
    _launch(q[:, :, :, None], k, q_out[:, :, :, None], k_out, cos, sin, back)
    return out


def _launch(q, k, q_out, k_out, cos, sin, back):
    """Rotates q [b, s, groups, members, d] and k [b, s, g, d] into outputs of these shapes, whose
    tokens follow each other in memory."""
    (b, s, groups, members, d), g = q.shape, k.shape[2]
    h, cos, sin = groups * members, cos.contiguous(), sin.contiguous()
    grid = lambda meta: (b * s, cdiv(h, meta["HEADS"]) + cdiv(g, meta["HEADS"]))  # noqa: E731
    layout = (*q.stride()[:4], *k.stride()[:3], *q_out.stride()[1:4], *k_out.stride()[1:3])
    sizes, sign = (s, h, g, members), -1.0 if back else 1.0
    (unit,) = units(gcd(*layout, d // 2))
    pointers = (q, k, cos, sin, q_out, k_out)
    _rotate[grid](*pointers, *sizes, sign, *layout, d // 2, power_of_two(d // 2), unit)


def split_rotated(
    qkv: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused projections [b, s, g, r + 2, d] -> (q [b, g * r, s, d] and k [b, g, s, d], rotated; v).

    As `rotate` of the parts, whose queries a kernel of heads alone needs a copy of, and whose
    gradients are concatenated in a pass of its own. Here the gradients of queries and keys are
    written into those of `qkv`.
    """
    return _SplitRotated.apply(qkv, cos, sin)  # type: ignore[no-untyped-call, no-any-return]  # torch


class _SplitRotated(torch.autograd.Function):
    """Not an operator: the values are a view of the input."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The parts, [b, heads, s, d] each."""
        ctx.save_for_backward(cos, sin)
        q, k = _rotate_packed(qkv, cos, sin)
        return q, k, qkv[:, :, :, -1].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the fused projections, contiguous."""
        return _rotate_packed_backward(*grads, *ctx.saved_tensors), None, None


def _fake_packed(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    b, s, g, parts, d = qkv.shape
    return tuple(qkv.new_empty(b, s, h, d).transpose(1, 2) for h in (g * (parts - 2), g))


@custom_op("rotate_packed(Tensor qkv, Tensor cos, Tensor sin) -> (Tensor, Tensor)", _fake_packed)
def _rotate_packed(qkv, cos, sin):
    """(queries, keys) [b, heads, s, d], each laid out as [b, s, heads, d]."""
    qkv = contiguous_rows(qkv)
    q, k = _fake_packed(qkv, cos, sin)
    q_out = q.transpose(1, 2).unflatten(2, (qkv.shape[2], -1))
    _launch(qkv[:, :, :, :-2], qkv[:, :, :, -2], q_out, k.transpose(1, 2), cos, sin, False)
    return q, k


def _fake_unpacked(of_q: Tensor, of_k: Tensor, *inputs: Tensor) -> Tensor:
    (b, h, s, d), g = of_q.shape, of_k.shape[1]
    return of_q.new_empty(b, s, g, h // g + 2, d)


@custom_op(
    "rotate_packed_backward(Tensor of_q, Tensor of_k, Tensor of_v, Tensor cos, Tensor sin)"
    " -> Tensor",
    _fake_unpacked,
)
def _rotate_packed_backward(of_q, of_k, of_v, cos, sin):
    out = _fake_unpacked(of_q, of_k)
    q, k = (contiguous_rows(x).transpose(1, 2) for x in (of_q, of_k))
    q = q.unflatten(2, (k.shape[2], -1))
    _launch(q, k, out[:, :, :, :-2], out[:, :, :, -2], cos, sin, True)
    out[:, :, :, -1] = of_v.transpose(1, 2)
    return out
