"""Splits fused projections into queries, keys and values; the backward joins their gradients.

b sequences of s tokens, g groups of r query heads and a key and a value head, d head width. The
parts are views. The backward reads the gradients once and writes those of the projections, in place
of a copy of each; of a bias that a GEMM has added it sums the gradient, in place of a pass of its
own. Its programs take one head of some tokens, several per SM, and sum in float32.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtcli.kernels.attention.tiles import contiguous_rows
from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.grouped_gemm import multiple, units
from mtcli.kernels.triton_launch import kernel, multiprocessors, power_of_two, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

PROGRAMS = 8  # per SM


def split_heads_reference(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fused projections [b, s, g, r + 2, d] -> queries [b, g * r, s, d], keys and values
    [b, g, s, d]."""
    # split, not slices: its backward is one concatenation instead of three padded sums
    parts = qkv.split([qkv.shape[3] - 2, 1, 1], 3)
    q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in parts)
    return q, k, v


def split_heads(qkv: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`split_heads_reference`; `bias` [g * (r + 2) * d] is in qkv already, detached, and gets its
    gradient here.

    Bytes moved on a GPU: 2 * numel * itemsize backward, unless there are several query heads in a
    group, which are copied in the forward.
    """
    if not runs_triton(qkv) or torch.compiler.is_compiling():
        assert bias is None, "the projection's GEMM sums its gradient"
        return split_heads_reference(qkv)
    return _SplitHeads.apply(qkv, bias)  # type: ignore[no-untyped-call, no-any-return]  # torch


class _SplitHeads(torch.autograd.Function):
    """Not an operator: the parts are views of the input."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The parts, [b, heads, s, d] each."""
        ctx.has_bias = bias is not None
        return split_heads_reference(qkv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradients of the fused projections, contiguous, and of the bias."""
        of_qkv, of_bias = join_heads(*grads, ctx.has_bias)
        return of_qkv, of_bias if ctx.has_bias else None


# fmt: off
@kernel([{"ROWS": rows, "num_warps": warps} for rows in (32, 16, 64) for warps in (4, 2, 8)],
        key=["d"])
def _join(
    q_ptr, k_ptr, v_ptr, out_ptr, sums_ptr, tokens, s, r, d,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    SUMS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: on
    """A program copies one head of every so many tokens; UNIT divides d and all strides."""
    head, heads, d = tl.program_id(1), tl.num_programs(1), multiple(d, UNIT)
    group, member = (head // (r + 2)).to(tl.int64), head % (r + 2)
    of_b = tl.where(member < r, q_b, tl.where(member == r, k_b, v_b))
    of_s = tl.where(member < r, q_s, tl.where(member == r, k_s, v_s))
    x = q_ptr + (group * r + member) * multiple(q_h, UNIT)
    if member >= r:
        x = k_ptr + group * multiple(k_h, UNIT)
        if member > r:
            x = v_ptr + group * multiple(v_h, UNIT)
    lane = tl.arange(0, LANES)[None, :]
    total = tl.zeros([ROWS, LANES], tl.float32)
    for first in range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS):
        token = (first + tl.arange(0, ROWS))[:, None]
        inside = (token < tokens) & (lane < d)
        b, t = (token // s).to(tl.int64), (token % s).to(tl.int64)
        at = x + b * multiple(of_b, UNIT) + t * multiple(of_s, UNIT) + lane
        grad = tl.load(at, mask=inside, other=0.0)
        to = out_ptr + (token.to(tl.int64) * heads + head) * d + lane
        tl.store(to, grad, mask=inside)
        total += grad.to(tl.float32)
    if SUMS:
        to = sums_ptr + (tl.program_id(0) * heads + head) * d + lane
        tl.store(to, tl.sum(total, 0)[None, :], mask=lane < d)


def _fake_joined(
    of_q: Tensor, of_k: Tensor, of_v: Tensor, sums: bool
) -> tuple[Tensor, Tensor]:
    (b, h, s, d), g = of_q.shape, of_k.shape[1]
    out = of_q.new_empty(b, s, g, h // g + 2, d)
    return out, of_q.new_empty((h + 2 * g) * d if sums else 0)


@custom_op(
    "join_heads(Tensor of_q, Tensor of_k, Tensor of_v, bool sums) -> (Tensor, Tensor)",
    _fake_joined,
)
def join_heads(of_q, of_k, of_v, sums):
    """([b, s, g, r + 2, d], its sum over b and s) of [b, heads, s, d] each; no sum is empty."""
    (b, h, s, d), g = of_q.shape, of_k.shape[1]
    out, _ = _fake_joined(of_q, of_k, of_v, sums)
    grads = [contiguous_rows(x) for x in (of_q, of_k, of_v)]
    layout = [stride for x in grads for stride in (x.stride(0), x.stride(2), x.stride(1))]
    heads = h + 2 * g
    programs = max(1, min(b * s, PROGRAMS * multiprocessors(out) // heads))
    parts = out.new_empty(programs if sums else 0, heads * d, dtype=torch.float32)
    sizes, (unit,) = (b * s, s, h // g, d), units(gcd(*layout, d))
    _join[programs, heads](*grads, out, parts, *sizes, *layout, sums, power_of_two(d), unit)
    return out, parts.sum(0).to(out.dtype) if sums else parts.new_empty(0, dtype=out.dtype)
