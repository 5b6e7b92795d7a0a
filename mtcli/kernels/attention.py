"""Attention with its log-sum-exp, so that partial results over blocks of keys can be merged.

b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width.
"""

import torch
from torch import Tensor

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(softmax(q k^T / sqrt(d)) v in q's dtype, its log-sum-exp), computed in float32 or wider.

    q [b, h, n, d], k and v [b, g, m, d] -> [b, h, n, d], [b, h, n]. `causal` needs n = m.
    """
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    mixed = (scores - lse[..., None]).exp() @ _per_head(v, q).to(scores.dtype)
    return mixed.to(q.dtype), lse


def attention_backward_reference(
    grad: Tensor, saved: tuple[Tensor, ...], lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for a block of keys, given the output and lse over all keys.

    `saved` is (q, k, v, output). FlashAttention's backward (arXiv:2205.14135, appendix B.4).
    """
    q, k, v, out = saved
    scores = _scores(q, k, causal)
    grad, out = grad.to(scores.dtype), out.to(scores.dtype)
    p = (scores - lse[..., None]).exp()
    dp = grad @ _per_head(v, q).to(scores.dtype).transpose(-1, -2)
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk = _per_group(ds.transpose(-1, -2) @ q.to(scores.dtype), k)
    dv = _per_group(p.transpose(-1, -2) @ grad, v)
    dq = ds @ _per_head(k, q).to(scores.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`attention_reference` by torch's flash kernel where there is one for the device."""
    if q.device.type != "cpu":
        return attention_reference(q, k, v, causal)
    return _flash_cpu(q, _per_head(k, q), _per_head(v, q), 0.0, causal)


def attention_backward(
    grad: Tensor, saved: tuple[Tensor, ...], lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward_reference` by torch's flash kernel where there is one."""
    q, k, v, out = saved
    if q.device.type != "cpu":
        return attention_backward_reference(grad, saved, lse, causal)
    heads = _per_head(k, q), _per_head(v, q)
    dq, dk, dv = _flash_cpu_backward(grad, q, *heads, out, lse, 0.0, causal)
    return dq, _per_group(dk, k), _per_group(dv, v)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a block's result to `out` (float32 or wider) and `lse`, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_()[..., None])
    out.add_(part * (part_lse - total).exp_()[..., None])
    lse.copy_(total)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _per_head(k, q).to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """[b, g, m, d] -> [b, h, m, d]: each group's for its h / g query heads."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _per_group(grad: Tensor, x: Tensor) -> Tensor:
    """[b, h, m, d] -> [b, g, m, d], summed over a group's query heads."""
    b, g, m, d = x.shape
    return grad if grad.shape[1] == g else grad.view(b, g, -1, m, d).sum(2)
