"""Attention with its log-sum-exp, so that partial results over blocks of keys can be merged.

b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width.
A `mask` is bool [b or 1, 1, n, m], True where a query sees a key; `causal` is False beside it. Our
kernels take the spans of keys that queries see in its place (`Spans`). A query that sees no key has
the result 0 and the log-sum-exp -inf, which merge as nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.blocked_attention import (
    attention_in_blocks,
    backward_in_blocks,
    forward_in_blocks,
)
from mtcli.kernels.flash import flash
from mtcli.kernels.flash_backward import flash_backward
from mtcli.kernels.flash_parts import Spans
from mtcli.kernels.launch import runs_triton
from mtcli.kernels.library_attention import library_for
from mtcli.kernels.merge import finite
from mtcli.kernels.products import is_slow, product_dtype
from mtcli.kernels.sizes import PART_ROW_BYTES, WHOLE_ROW_BYTES

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(softmax(q k^T / sqrt(d)) v in q's dtype, its log-sum-exp), computed in float32 or wider.

    q [b, h, n, d], k and v [b, g, m, d] -> [b, h, n, d], [b, h, n]. `causal` needs n = m.
    """
    scores = _scores(q, k, causal, mask)
    lse = scores.logsumexp(-1)
    mixed = (scores - finite(lse)[..., None]).exp() @ _per_head(v, q).to(scores.dtype)
    return mixed.to(q.dtype), lse


def attention_backward_reference(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    lse: Tensor,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for a block of keys, given the output and lse over all keys.

    `saved` is (q, k, v, output). FlashAttention's backward (arXiv:2205.14135, appendix B.4).
    """
    q, k, v, out = saved
    scores = _scores(q, k, causal, mask)
    grad, out = grad.to(scores.dtype), out.to(scores.dtype)
    p = (scores - finite(lse)[..., None]).exp()
    dp = grad @ _per_head(v, q).to(scores.dtype).transpose(-1, -2)
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk = _per_group(ds.transpose(-1, -2) @ q.to(scores.dtype), k)
    dv = _per_group(p.transpose(-1, -2) @ grad, v)
    dq = ds @ _per_head(k, q).to(scores.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | Spans | None = None
) -> tuple[Tensor, Tensor]:
    """`attention_reference`, on a GPU by our flash kernel or, without a mask, by the library that
    was measured to be faster; by torch's flash kernel on a CPU."""
    if runs_triton(q) and not isinstance(mask, Tensor):
        if mask is None and (library := library_for("attention", q, k)):
            return library.forward(q, k, v, causal)
        return flash(q, k, v, causal, *(mask or (None, None)))
    assert not isinstance(mask, Spans), "spans are for our kernels"
    if q.device.type != "cpu":
        return attention_reference(q, k, v, causal, mask)
    if is_slow(q):
        out, lse = attention(q.float(), k.float(), v.float(), causal, mask)
        return out.to(q.dtype), lse
    heads = _per_head(k, q), _per_head(v, q)
    if mask is None and _fits(k, PART_ROW_BYTES):
        return forward_in_blocks(q, *heads, causal)
    if mask is None:
        return _flash_cpu(q, *heads, 0.0, causal)
    out, lse = _flash_cpu(q, *heads, 0.0, causal, attn_mask=_bias(mask, q))
    return out, lse.masked_fill(~mask.any(-1), float("-inf"))  # where the kernel says 0


def attention_backward(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    lse: Tensor,
    causal: bool,
    mask: Tensor | Spans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward_reference` by what `attention` chooses from, for itself."""
    q, k, v, out = saved
    if runs_triton(q) and not isinstance(mask, Tensor):
        if mask is None and (library := library_for("attention_backward", q, k)):
            return library.backward(grad, saved, lse, causal)
        return flash_backward(grad, *saved, lse, causal, *(mask or (None, None)))
    assert not isinstance(mask, Spans), "spans are for our kernels"
    if q.device.type != "cpu":
        return attention_backward_reference(grad, saved, lse, causal, mask)
    if is_slow(q):
        wide = tuple(x.float() for x in saved)
        dq, dk, dv = attention_backward(grad.float(), wide, lse, causal, mask)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
    heads = _per_head(k, q), _per_head(v, q)
    if mask is None and _fits(k, WHOLE_ROW_BYTES):
        dq, dk, dv = backward_in_blocks(grad, (q, *heads, out), lse, causal)
    else:
        bias = None if mask is None else _bias(mask, q)
        dq, dk, dv = _flash_cpu_backward(grad, q, *heads, out, lse, 0.0, causal, attn_mask=bias)
    return dq, _per_group(dk, k), _per_group(dv, v)


def _bias(mask: Tensor, q: Tensor) -> Tensor:
    """What is added to the scores, in q's dtype: 0 where seen, else -inf."""
    return torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _per_head(k, q).to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5
    assert mask is None or not causal, "a mask is causal itself"
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _fits(k: Tensor, row_bytes: int) -> bool:
    """Whether a row of scores is short, in a dtype wide enough for a log-sum-exp."""
    return k.element_size() >= 4 and k.shape[2] * k.element_size() <= row_bytes


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """[b, g, m, d] -> [b, h, m, d]: each group's for its h / g query heads."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _per_group(grad: Tensor, x: Tensor) -> Tensor:
    """[b, h, m, d] -> [b, g, m, d], summed over a group's query heads."""
    b, g, m, d = x.shape
    return grad if grad.shape[1] == g else grad.view(b, g, -1, m, d).sum(2)


def whole_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, causal or of all keys, by what is quickest on the device.

    q [b, h, n, d], k and v [b, g, n, d] -> [b, h, n, d].
    """
    wide = product_dtype(q)
    short = q.shape[2] * wide.itemsize <= WHOLE_ROW_BYTES
    if q.device.type == "cpu" and short and torch.is_grad_enabled():
        return attention_in_blocks(q, _per_head(k, q), _per_head(v, q), causal)
    grouped, (wide_q, k, v) = q.shape[1] != k.shape[1], (x.to(wide) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(wide_q, k, v, is_causal=causal, enable_gqa=grouped)
    return mixed.to(q.dtype)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Softmax attention of the spans of keys that queries see, by our kernels: [b, h, n, d]."""
    return flash(q, k, v, False, *spans)[0]
