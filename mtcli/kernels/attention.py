"""Attention with its log-sum-exp, so that partial results over blocks of keys can be merged.

b sequences, h query heads, g key-value groups (g divides h), n queries, m keys, d head width.
A `mask` is bool [b or 1, 1, n, m], True where a query sees a key; `causal` is False beside it. A
query that sees no key has the result 0 and the log-sum-exp -inf, which merge as nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.products import is_slow

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
    mixed = (scores - _finite(lse)[..., None]).exp() @ _per_head(v, q).to(scores.dtype)
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
    p = (scores - _finite(lse)[..., None]).exp()
    dp = grad @ _per_head(v, q).to(scores.dtype).transpose(-1, -2)
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk = _per_group(ds.transpose(-1, -2) @ q.to(scores.dtype), k)
    dv = _per_group(p.transpose(-1, -2) @ grad, v)
    dq = ds @ _per_head(k, q).to(scores.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`attention_reference` by torch's flash kernel where there is one for the device."""
    if q.device.type != "cpu":
        return attention_reference(q, k, v, causal, mask)
    heads = _per_head(k, q), _per_head(v, q)
    if mask is None:
        return _flash_cpu(q, *heads, 0.0, causal)
    out, lse = _flash_cpu(q, *heads, 0.0, causal, attn_mask=_bias(mask, q))
    return out, lse.masked_fill(~mask.any(-1), float("-inf"))  # where the kernel says 0


def attention_backward(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    lse: Tensor,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward_reference` by torch's flash kernel where there is one."""
    q, k, v, out = saved
    if q.device.type != "cpu":
        return attention_backward_reference(grad, saved, lse, causal, mask)
    heads = _per_head(k, q), _per_head(v, q)
    bias = None if mask is None else _bias(mask, q)
    dq, dk, dv = _flash_cpu_backward(grad, q, *heads, out, lse, 0.0, causal, attn_mask=bias)
    return dq, _per_group(dk, k), _per_group(dv, v)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a block's result to `out` (float32 or wider) and `lse`, in place."""
    total = torch.logaddexp(lse, part_lse)
    finite = _finite(total)
    out.mul_((lse - finite).exp_()[..., None])
    out.add_(part * (part_lse - finite).exp_()[..., None])
    lse.copy_(total)


def _finite(lse: Tensor) -> Tensor:
    """The same, but so that -inf less it is -inf and not NaN where a query has seen nothing."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


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


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """[b, g, m, d] -> [b, h, m, d]: each group's for its h / g query heads."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _per_group(grad: Tensor, x: Tensor) -> Tensor:
    """[b, h, m, d] -> [b, g, m, d], summed over a group's query heads."""
    b, g, m, d = x.shape
    return grad if grad.shape[1] == g else grad.view(b, g, -1, m, d).sum(2)


def whole_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, causal or of all keys, by what is quickest on the device.

    q [b, h, n, d], k and v [b, g, n, d] -> [b, h, n, d]. On CPU torch's flash kernel leaves the
    matrix units idle. Up to 512 tokens of float32 and 1024 of bfloat16, products over blocks of
    heads that stay in the cache took 0.8 to 0.9 and 0.4 to 0.6 of its forward time and 0.6 to 0.7
    and 0.5 to 0.8 of its backward time (one core of an AVX-512 EPYC, head_dim 64).
    """
    if is_slow(q):
        return whole_attention(q.float(), k.float(), v.float(), causal).to(q.dtype)
    row_bytes = q.shape[2] * q.element_size()
    if q.device.type != "cpu" or row_bytes > 2048 or not torch.is_grad_enabled():
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return _InBlocks.apply(q, _per_head(k, q), _per_head(v, q), causal)


class _InBlocks(torch.autograd.Function):
    """Attention by plain products, a block of heads at a time; keeps no probabilities."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """[b, h, n, d] each -> [b, h, n, d]."""
        shape = q.shape
        q, k, v = (x.reshape(-1, *shape[2:]) for x in (q, k, v))
        out, unseen = torch.empty_like(q), _unseen(q, causal)
        for rows in _head_blocks(q):
            torch.bmm(_probabilities(q[rows], k[rows], unseen), v[rows], out=out[rows])
        ctx.save_for_backward(q, k, v, out)
        ctx.causal = causal
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """As attention_backward_reference; the probabilities are computed again."""
        q, k, v, out = ctx.saved_tensors
        shape, unseen = grad.shape, _unseen(q, ctx.causal)
        grad = grad.reshape(q.shape)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = (grad * out).sum(-1, keepdim=True)
        for rows in _head_blocks(q):
            p = _probabilities(q[rows], k[rows], unseen)
            torch.bmm(p.transpose(1, 2), grad[rows], out=dv[rows])
            ds = torch.bmm(grad[rows], v[rows].transpose(1, 2))
            ds.sub_(delta[rows]).mul_(p).mul_(shape[-1] ** -0.5)
            torch.bmm(ds, k[rows], out=dq[rows])
            torch.bmm(ds.transpose(1, 2), q[rows], out=dk[rows])
        return dq.view(shape), dk.view(shape), dv.view(shape), None


def _probabilities(q_hnd: Tensor, k_hnd: Tensor, unseen: Tensor) -> Tensor:
    scores = torch.baddbmm(unseen, q_hnd, k_hnd.transpose(1, 2), alpha=q_hnd.shape[-1] ** -0.5)
    return torch.softmax(scores, -1, out=scores)


def _unseen(q_hnd: Tensor, causal: bool) -> Tensor:
    """[n, n]: -inf where a key comes after the query, else 0; without `causal` 0 everywhere."""
    fill = float("-inf") if causal else 0.0
    return torch.full((q_hnd.shape[1],) * 2, fill, dtype=q_hnd.dtype).triu(1)


def _head_blocks(q_hnd: Tensor) -> list[slice]:
    """Blocks of heads whose [n, n] scores fill about a MiB, an L2 cache."""
    heads, n, _ = q_hnd.shape
    step = max(1, 2**20 // max(1, n * n * q_hnd.element_size()))
    return [slice(i, i + step) for i in range(0, heads, step)]
