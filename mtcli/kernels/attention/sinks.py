"""Attention sinks: a logit of each head that joins the softmax's denominator and has no value.

A sink s leaves exp(x_j) / (sum_j exp(x_j) + exp(s)) of key j (gpt-oss, arXiv:2508.10925, section
2). Of attention without sinks, whose log-sum-exp is lse, the output is multiplied by sigmoid(lse -
s): once, after the last merge of blocks of keys. With that output and the log-sum-exp that includes
the sink, any backward of attention gives the gradients of queries, keys and values.

b sequences, h query heads, n queries, d head width.
"""

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of attention, with `sinks` [b, h] in the softmax; None adds none.

    out [b, h, n, d], lse [b, h, n]. A query that attends to no key keeps the output 0.
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[..., None])
    return (out * (lse - total).exp_()[..., None]).to(out.dtype), total


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """The gradient of `sinks` [b, h], from that of the output and what `with_sinks` returned."""
    if sinks is None:
        return None
    delta = (grad.to(lse.dtype) * out).sum(-1)
    shares = (sinks.to(lse.dtype)[..., None] - lse).exp_()
    return (shares * delta).sum(-1).neg_().to(sinks.dtype)
