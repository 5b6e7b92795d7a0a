"""Computes B models' multi-head attention as one batch of B * N samples.

Projections are batched products per model; attention itself has no parameters, so heads of all
models and samples are one batch of scaled dot products. TransformerEncoderLayer and the other
modules of torch.nn.modules.transformer run as torch wrote them, on fused children.

Shapes: R = B * N rows, T queries, S keys, H heads, D channels of a head, E embed_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.core.config.errors import wrong
from mtcli_fused.operators import FusedOperator, keep_mask, linear


class MultiheadAttention(FusedOperator):
    """torch.nn.MultiheadAttention's forward; per-sample masks [R * H, T, S] are not taken."""

    varied = ("dropout",)

    def forward(  # noqa: PLR0913 - as torch's
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns [R, T, E], or [T, R, E] without `batch_first`, and the weights [R, T, S]."""
        one_input = query is key and key is value
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        inputs = (query,) if one_input else (query, key, value)
        q, k, v = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in self._projected(*inputs)
        )
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _float_mask(attn_mask, key_padding_mask, q)
        rates = set(self.values["dropout"]) if self.training else {0.0}
        if need_weights or len(rates) > 1:
            y, weights = self._explicit(q, k, v, mask, causal)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, rates.pop(), causal)
            weights = None
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return (y if self.batch_first else y.transpose(0, 1)), weights if need_weights else None

    def _projected(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [R, T or S, E]; one product where they are of one input."""
        array, bias = self.array, self.in_proj_bias
        if self._qkv_same_embed_dim and len(inputs) == 1:
            return linear(array, inputs[0], self.in_proj_weight, bias).chunk(3, -1)
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3, 1)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if bias is None else bias.chunk(3, 1)
        each = zip(inputs * (3 // len(inputs)), weights, biases, strict=True)
        return tuple(linear(array, *operands) for operands in each)

    def _explicit(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention by its formula: where its weights are asked for, or rates of dropout vary."""
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(above, float("-inf"))
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if self.training:
            rates = self.values["dropout"]
            weights = weights * keep_mask(self.array, weights, rates, (0, weights.dim()))
        return weights @ v, weights


def _float_mask(attn_mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """Builds the bias that is added to scores [R, H, T, S]: masks [T, S] and [R, S], True being
    masked."""
    masks = []
    if attn_mask is not None:
        if attn_mask.dim() != 2:
            raise wrong(f"attn_mask has shape {list(attn_mask.shape)}, not [T, S]")
        masks.append(attn_mask)
    if padding is not None:
        masks.append(padding[:, None, None])
    masks = [
        torch.zeros_like(m, dtype=like.dtype).masked_fill_(m, float("-inf"))
        if m.dtype == torch.bool
        else m.to(like.dtype)
        for m in masks
    ]
    return sum(masks[1:], masks[0]) if masks else None
