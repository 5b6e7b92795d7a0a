"""Attention with a soft cap of its scores where no kernel has one, a block of queries at a time.

Torch's kernels cap no scores. Shapes and masks are those of `attention.py`, with one key-value head
for each query head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mtcli.kernels import limits
from mtcli.kernels.attention.merge import finite
from mtcli.kernels.softcap import softcap, softcap_slope


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, cap: float
) -> tuple[Tensor, Tensor]:
    """(output [b, h, n, d], log-sum-exp [b, h, n]) over k and v [b, h, m, d], in q's dtype."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for rows, keys in _blocks(q, k, causal):
        scores = _hidden(_capped(q[:, :, rows], k[:, :, keys], cap), causal, mask, rows, keys)
        lse[:, :, rows] = scores.logsumexp(-1)
        p = scores.sub_(finite(lse[:, :, rows])[..., None]).exp_()
        out[:, :, rows] = p @ v[:, :, keys]
    return out, lse


def capped_attention_backward(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for a block of keys, given output and log-sum-exp over all keys."""
    q, k, v, out = saved
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad * out).sum(-1, keepdim=True)
    for rows, keys in _blocks(q, k, causal):
        scores = _capped(q[:, :, rows], k[:, :, keys], cap)
        slope = softcap_slope(scores, cap).mul_(q.shape[-1] ** -0.5)
        p = _hidden(scores, causal, mask, rows, keys)
        p = p.sub_(finite(lse[:, :, rows])[..., None]).exp_()
        dv[:, :, keys] += p.mT @ grad[:, :, rows]
        dp = grad[:, :, rows] @ v[:, :, keys].mT
        ds = dp.sub_(delta[:, :, rows]).mul_(p).mul_(slope)
        dq[:, :, rows] = ds @ k[:, :, keys]
        dk[:, :, keys] += ds.mT @ q[:, :, rows]
    return dq, dk, dv


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of queries, whose scores fill a cache, and the keys that they see."""
    (b, h, n, _), m = q.shape, k.shape[2]
    for rows in limits.row_slices(n, limits.block_rows(b * h * m * q.element_size())):
        yield rows, slice(rows.stop if causal else m)


def _capped(q: Tensor, k: Tensor, cap: float) -> Tensor:
    return softcap(q @ k.mT * q.shape[-1] ** -0.5, cap)


def _hidden(scores: Tensor, causal: bool, mask: Tensor | None, rows: slice, keys: slice) -> Tensor:
    """The scores, -inf where a key is hidden."""
    if causal:
        positions = torch.arange(keys.stop, device=scores.device)
        return scores.masked_fill_(positions > positions[rows, None], float("-inf"))
    return scores if mask is None else scores.masked_fill_(~mask[:, :, rows], float("-inf"))
