"""Attention with its log-sum-exp, so that partial results over blocks of keys can be merged.

b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width.
A `mask` is bool [b or 1, 1, n, m], True where a query attends to a key; with a mask `causal` is
False. The Triton kernels take `KeyRanges` instead of a mask. A query that attends to no key has the
output 0 and the log-sum-exp -inf, so that a merge with it changes nothing. A `cap` above 0 replaces
scores x = q k^T / sqrt(d) by cap * tanh(x / cap), ahead of the mask. `sinks` [b, h] join softmaxes
(sinks.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.attention.capped import capped_attention, capped_attention_backward
from mtcli.kernels.attention.cpu import (
    IN_GRAPH_ROWS,
    attend_by_group,
    cpu_attention,
    cpu_attention_backward,
    cpu_attention_lse,
    cpu_attention_of_documents,
)
from mtcli.kernels.attention.flash_backward import flash_backward
from mtcli.kernels.attention.flash_forward import flash
from mtcli.kernels.attention.library import library_for
from mtcli.kernels.attention.merge import finite
from mtcli.kernels.attention.sinks import sinks_gradient, with_sinks
from mtcli.kernels.attention.tiles import KeyRanges
from mtcli.kernels.gemm import gemm_dtype, runs_in_float32
from mtcli.kernels.limits import CPU_ATTENTION_LSE_ROW_BYTES, CPU_ATTENTION_ROW_BYTES
from mtcli.kernels.softcap import softcap, softcap_slope
from mtcli.kernels.triton_launch import runs_triton

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(softmax(q k^T / sqrt(d)) v in q's dtype, its log-sum-exp), computed in float32 or wider.

    q [b, h, n, d], k and v [b, g, m, d] -> [b, h, n, d], [b, h, n]. `causal` needs n = m.
    """
    scores = _masked(softcap(_scores(q, k), cap), causal, mask)
    lse = scores.logsumexp(-1)
    mixed = (scores - finite(lse)[..., None]).exp() @ _per_head(v, q).to(scores.dtype)
    return mixed.to(q.dtype), lse


def attention_backward_reference(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    lse: Tensor,
    causal: bool,
    mask: Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for a block of keys, given the output and lse over all keys.

    `saved` is (q, k, v, output). FlashAttention's backward (arXiv:2205.14135, appendix B.4).
    """
    q, k, v, out = saved
    capped = softcap(_scores(q, k), cap)
    scores = _masked(capped, causal, mask)
    grad, out = grad.to(scores.dtype), out.to(scores.dtype)
    p = (scores - finite(lse)[..., None]).exp()
    dp = grad @ _per_head(v, q).to(scores.dtype).transpose(-1, -2)
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    ds = ds * softcap_slope(capped, cap) if cap else ds
    dk = _per_group(ds.transpose(-1, -2) @ q.to(scores.dtype), k)
    dv = _per_group(p.transpose(-1, -2) @ grad, v)
    dq = ds @ _per_head(k, q).to(scores.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | KeyRanges | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`attention_reference` by the fastest backend.

    On a GPU that is the Triton flash kernel or, without a mask or cap, that of `library_for`. On a
    CPU it is torch's flash kernel or, except on Intel, GEMMs over blocks of heads for short rows
    without a mask; with a cap, GEMMs over blocks of queries.
    """
    if runs_triton(q) and not isinstance(mask, Tensor):
        if mask is None and not cap and (library := library_for("attention", q, k)):
            return library.forward(q, k, v, causal)
        return flash(q, k, v, causal, *(mask or (None, None)), cap)
    assert not isinstance(mask, KeyRanges), "key ranges are for our kernels"
    if q.device.type != "cpu":
        return attention_reference(q, k, v, causal, mask, cap)
    if runs_in_float32(q) or (cap and q.element_size() < 4):
        out, lse = attention(q.float(), k.float(), v.float(), causal, mask, cap)
        return out.to(q.dtype), lse
    heads = _per_head(k, q), _per_head(v, q)
    if cap:
        return capped_attention(q, *heads, causal, mask, cap)
    if mask is None and _is_short(k, CPU_ATTENTION_LSE_ROW_BYTES):
        return cpu_attention_lse(q, *heads, causal)
    if mask is None:
        return _flash_cpu(q, *heads, 0.0, causal)
    out, lse = _flash_cpu(q, *heads, 0.0, causal, attn_mask=_bias(mask, q))
    # Torch's kernel gives 0 where a query attends to no key.
    return out, lse.masked_fill(~mask.any(-1), float("-inf"))


def attention_backward(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    lse: Tensor,
    causal: bool,
    mask: Tensor | KeyRanges | None = None,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward_reference` by the fastest of `attention`'s backends."""
    q, k, v, out = saved
    if runs_triton(q) and not isinstance(mask, Tensor):
        if mask is None and not cap and (library := library_for("attention_backward", q, k)):
            return library.backward(grad, saved, lse, causal)
        return flash_backward(grad, *saved, lse, causal, *(mask or (None, None)), cap)
    assert not isinstance(mask, KeyRanges), "key ranges are for our kernels"
    if q.device.type != "cpu":
        return attention_backward_reference(grad, saved, lse, causal, mask, cap)
    if runs_in_float32(q) or (cap and q.element_size() < 4):
        wide = tuple(x.float() for x in saved)
        dq, dk, dv = attention_backward(grad.float(), wide, lse, causal, mask, cap)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
    heads = _per_head(k, q), _per_head(v, q)
    if cap:
        dq, dk, dv = capped_attention_backward(grad, (q, *heads, out), lse, causal, mask, cap)
    elif mask is None and _is_short(k, CPU_ATTENTION_ROW_BYTES):
        dq, dk, dv = cpu_attention_backward(grad, (q, *heads, out), lse, causal)
    else:
        bias = None if mask is None else _bias(mask, q)
        dq, dk, dv = _flash_cpu_backward(grad, q, *heads, out, lse, 0.0, causal, attn_mask=bias)
    return dq, _per_group(dk, k), _per_group(dv, v)


def _bias(mask: Tensor, q: Tensor) -> Tensor:
    """The mask as a bias of the scores, in q's dtype: 0 where True, else -inf."""
    return torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))


def _scores(q: Tensor, k: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.to(wide) @ _per_head(k, q).to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5


def _masked(scores: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """The scores, -inf where a key is hidden."""
    assert mask is None or not causal, "a mask is causal itself"
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _is_short(k: Tensor, row_bytes: int) -> bool:
    """Whether a row of scores takes at most `row_bytes`, in a dtype wide enough for a
    log-sum-exp."""
    return k.element_size() >= 4 and k.shape[2] * k.element_size() <= row_bytes


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeats keys or values for the h / g query heads of a group: [b, g, m, d] -> [b, h, m, d]."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _per_group(grad: Tensor, x: Tensor) -> Tensor:
    """Sums over a group's query heads: [b, h, m, d] -> [b, g, m, d]."""
    b, g, m, d = x.shape
    return grad if grad.shape[1] == g else grad.view(b, g, -1, m, d).sum(2)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, causal or over all keys, by the fastest backend; differentiable.

    q [b, h, n, d], k and v [b, g, n, d] -> [b, h, n, d].
    """
    if cap or sinks is not None:
        return _sdpa_by_lse(q, k, v, causal, None, cap, sinks)
    wide = gemm_dtype(q)
    short = q.shape[2] * wide.itemsize <= CPU_ATTENTION_ROW_BYTES
    short = short or (torch.compiler.is_compiling() and q.shape[2] <= IN_GRAPH_ROWS)
    if q.device.type == "cpu" and short and torch.is_grad_enabled():
        return cpu_attention(q, _per_head(k, q), _per_head(v, q), causal)
    # Torch's kernel for float32 takes no groups of heads, and GEMMs would keep all scores.
    if q.device.type != "cpu" and wide == torch.float32:
        k, v = _per_head(k, q), _per_head(v, q)
    grouped, (wide_q, k, v) = q.shape[1] != k.shape[1], (x.to(wide) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(wide_q, k, v, is_causal=causal, enable_gqa=grouped)
    return mixed.to(q.dtype)


def _sdpa_by_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | KeyRanges | None,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    if runs_triton(q) and not isinstance(mask, Tensor):
        return flash(q, k, v, causal, *(mask or (None, None)), cap, sinks)[0]
    return _SdpaByLse.apply(q, k, v, sinks, causal, mask, cap)


class _SdpaByLse(torch.autograd.Function):
    """`attention` with a soft cap or sinks, whose gradients are those of `attention_backward`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        causal: bool,
        mask: Tensor | KeyRanges | None,
        cap: float,
    ) -> Tensor:
        out, lse = with_sinks(*attention(q, k, v, causal, mask, cap), sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.options = causal, mask, cap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, lse, sinks = ctx.saved_tensors
        gradients = attention_backward(grad, tuple(saved), lse, *ctx.options)
        return *gradients, sinks_gradient(grad, saved[-1], lse, sinks), None, None, None


def document_sdpa(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: Sequence[int], cap: float = 0.0
) -> Tensor:
    """`sdpa` of rows [b, h, s, d] that are divided, row by row, into documents of `lengths` tokens.

    Tokens attend to their own document alone.
    """
    short = max(lengths) * gemm_dtype(q).itemsize <= CPU_ATTENTION_ROW_BYTES
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if q.device.type == "cpu" and short and eager and not cap:
        return cpu_attention_of_documents(q, _per_head(k, q), _per_head(v, q), causal, lengths)
    tokens = (x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (q, k, v))  # [n, h, d] each
    parts = [_document(*qkv, causal, cap) for qkv in zip(*tokens, strict=True)]
    return torch.cat(parts).unflatten(0, (len(q), -1)).transpose(1, 2)


def _document(q: Tensor, k: Tensor, v: Tensor, causal: bool, cap: float) -> Tensor:
    """Attention of one document: q [n, h, d], k and v [n, g, d] -> [n, h, d]."""
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    return sdpa(*heads, causal, cap)[0].transpose(0, 1)


def masked_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | KeyRanges | None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`sdpa` of each query over the keys of its mask: [b, h, n, d]."""
    if cap or sinks is not None:
        return _sdpa_by_lse(q, k, v, False, mask, cap, sinks)
    if isinstance(mask, KeyRanges):
        return flash(q, k, v, False, *mask)[0]
    grouped = q.shape[1] != k.shape[1]
    is_wide = q.device.type == "cpu" and q.dtype.itemsize >= 4  # 16 bits would round the scores
    if grouped and is_wide and q.shape[2] == 1 and not q.requires_grad:
        return attend_by_group(q, k, v, mask)
    if grouped and mask is not None and q.is_cuda:
        # Of torch's kernels the one that takes masks takes no groups, and the fallback has all
        # scores in memory: 2 GiB for 16,384 tokens in rows of 1,024, with 32 heads in float32.
        k, v, grouped = _per_head(k, q), _per_head(v, q), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
