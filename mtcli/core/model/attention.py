"""Self-attention over this rank's heads; grouped queries, causal, full or masked.

b sequences of s tokens, T = b * s; h query heads and g key-value groups of this rank, r = h / g.
"""

from functools import partial
from math import prod
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.visibility import layer_visibility
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.rope import halves, layer_table
from mtcli.core.parallel.attention_mask import AttentionMask
from mtcli.core.parallel.context import attention_over, gather_sequence, zigzag
from mtcli.core.parallel.factory import LayerFactory
from mtcli.core.parallel.norms import HeadNorms
from mtcli.kernels.attention.attention import attention, masked_sdpa
from mtcli.kernels.attention.merge import merge_
from mtcli.kernels.attention.sinks import with_sinks
from mtcli.kernels.attention.softmax import ScoreDropout, masked_softmax
from mtcli.kernels.gemm import matmul
from mtcli.kernels.softcap import softcap
from mtcli.kernels.split_heads import split_heads
from mtcli.kernels.triton_launch import runs_triton

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


class Attention(nn.Module):
    """Query, key and value projection, scaled dot products, output projection."""

    def __init__(self, layer: int, model: ModelConfig, build: LayerFactory, seed: int) -> None:
        super().__init__()
        name = f"blocks.{layer}.attention"
        self.make_projections(name, model, build)
        self.out = build.row_linear(f"{name}.out")
        self.sinks = build.optional(f"{name}.sinks")
        self.layer, self.head_dim = layer, model.head_dim
        self.visibility, self.table = layer_visibility(model, layer), layer_table(model, layer)
        self.num_interleaved = model.rotary_dim * model.rope_interleaved
        # what comes between the projection and the rotation
        self.reorders = self.num_interleaved > 0 or model.qk_norm in ("head", "each_head")
        # kernels multiply scores by 1 / sqrt(head_dim)
        self.query_scale = model.attention_scale * model.head_dim**0.5 or 1.0
        tp = build.groups.tp
        # of more ranks than key-value heads each has one, with fewer of its query heads
        self.queries_per_group = model.num_heads // max(model.num_kv_heads, tp.size)
        self.num_groups = max(1, model.num_kv_heads // tp.size)
        self.num_heads, self.cap = model.num_heads, model.attention_softcap
        self.stream = build.dropout(f"{name}.probabilities", model.attention_dropout, seed)
        self.tp_rank, self.cp = tp.rank, build.groups.cp
        self.attend = attention_over(build.cp_mode)

    @property
    def cached_numbers(self) -> int:
        """How many numbers of a token a cache keeps on this rank: a key and a value of each
        group."""
        return 2 * self.num_groups * self.head_dim

    def make_projections(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        """Makes the fused projection to queries, keys and values, and their norms."""
        self.qkv = build.column_linear(f"{name}.qkv")
        self.share_heads = build.share_heads(f"{name}.qkv")
        self.qk_norm = model.qk_norm
        if self.qk_norm != "none":
            make = partial(HeadNorms, build=build) if self.qk_norm == "each_head" else build.norm
            self.q_norm, self.k_norm = (make(f"{name}.{x}_norm", model) for x in "qk")
        local = build.table[f"{name}.qkv.weight"].local_shape(build.groups.layout)
        self.columns = local[:-1]  # [g, r + 2, d], or of shared heads fewer columns of more queries

    @property
    def output_bias(self) -> Tensor | None:
        """The bias [D] of the output projection, which a caller may add, or None."""
        return cast(Tensor | None, self.out.flat_bias)

    def forward(self, x_TD: Tensor, inputs: Inputs, with_bias: bool = True) -> Tensor:
        """x_TD [T/tp, D] -> [T/tp, D]."""
        mixed_TF = self.mix(self.project(x_TD, inputs), inputs)
        return cast(Tensor, self.out(mixed_TF, with_bias, inputs.numbers))

    def project(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """x_TD [T/tp, D] -> query, key and value of this rank's heads [T, g * (r + 2) * d]."""
        trains_bias = self._split_bias(x_TD) is None
        qkv_TF = self.qkv(x_TD, numbers=inputs.numbers, trains_bias=trains_bias)
        if self.qk_norm == "projection":  # here every column of a shared head is on one rank
            q, k, v = qkv_TF.view(-1, *self.columns).split([self.columns[1] - 2, 1, 1], 2)
            q, k = _normed(self.q_norm, q, 1), _normed(self.k_norm, k, 1)
            qkv_TF = torch.cat([q, k, v], 2).flatten(1)
        return cast(Tensor, self.share_heads(qkv_TF))

    @property
    def _splits_only(self) -> bool:
        """Whether attention takes the columns of the projections as they are."""
        plain = self.table is None and self.qk_norm == "none"
        return plain and isinstance(self.share_heads, nn.Identity)

    def _split_bias(self, x: Tensor) -> Tensor | None:
        """The bias of the projections, where `split_heads` sums its gradient; else None."""
        sums = runs_triton(x) and not torch.compiler.is_compiling() and self._splits_only
        bias = self.qkv.flat_bias if sums else None
        return cast(Tensor | None, bias) if bias is not None and bias.requires_grad else None

    def mix(self, qkv_TF: Tensor, inputs: Inputs) -> Tensor:
        """Fused projections [T, g * (r + 2) * head_dim] -> attended values [T, h * head_dim]."""
        b, s = inputs.shape
        r, d = self.queries_per_group, self.head_dim
        qkv = qkv_TF.view(b, s, -1, r + 2, d)
        table = None if self.table is None or self.reorders else inputs.rotations[self.table]
        if table is not None and table.splits(qkv):
            q, k, v = table.split(qkv)
        elif self._splits_only:
            q, k, v = split_heads(qkv, self._split_bias(qkv))
        else:
            # split, not slices: its backward is one concatenation instead of three padded sums
            q, k, v = qkv.split([r, 1, 1], 3)
            if self.qk_norm == "head":
                q, k = _normed(self.q_norm, q, -1), _normed(self.k_norm, k, -1)
            elif self.qk_norm == "each_head":
                q, k = self.q_norm(q), self.k_norm(k)
            q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in (q, k, v))  # [b, heads, s, d]
            q, k = self.rotated(q, k, inputs)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        if inputs.cache is not None:
            k, v = inputs.cache.extend(self.layer, k, v)
        mixed = self._attend(q, k, v, inputs)
        return mixed.transpose(1, 2).reshape(b * s, -1)

    def rotated(self, q: Tensor, k: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Queries and keys [b, heads, s, d], rotated where the layer rotates them."""
        if self.table is None:
            return q, k
        if self.num_interleaved:
            q, k = (halves(x, self.num_interleaved) for x in (q, k))
        return inputs.rotations[self.table](q, k)

    def expanded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of this rank's heads, by what a cache keeps of the layer."""
        return k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
        sinks, cap = self._sinks(q), self.cap
        masking = AttentionMask(self.visibility, inputs.documents, cap, sinks)
        paths = inputs.paths
        if self.stream.active and inputs.numbers is not None:
            return self._attend_with_dropout((q, k, v), inputs.numbers, masking)
        if inputs.prefix is not None:
            prefix = self.expanded(*inputs.prefix.layers[self.layer])
            return attend_after(prefix, (q, k, v), masking, inputs)
        if paths is not None:
            return masked_sdpa(q, k, v, masking.of_paths(paths, inputs.positions), cap, sinks)
        cache = inputs.cache
        if cache is not None and cache.has_past(q, k):
            return masked_sdpa(q, k, v, cache.mask(masking, q, k.shape[2]), cap, sinks)
        return self.attend(q, k, v, self.cp, masking)

    def _sinks(self, q: Tensor) -> Tensor | None:
        """The sinks of q's heads [b, h], or None; in an array each model's are of its sequences."""
        if self.sinks is None:
            return None
        b, h = q.shape[:2]
        of_models = self.sinks.view(-1, 1, h)
        return of_models.expand(-1, b // len(of_models), -1).reshape(b, h)

    def _attend_with_dropout(self, qkv: Heads, numbers: Tensor, masking: AttentionMask) -> Tensor:
        """Attention with dropout of probabilities, indexed by (query token, head, key position)."""
        q, *kv = qkv
        k, v = (
            gather_sequence(x, self.cp).repeat_interleave(self.queries_per_group, 1) for x in kv
        )
        s = k.shape[2]
        keys = torch.arange(s, device=q.device)
        positions = zigzag(s, self.cp.size, self.cp.rank, q.device)
        q = q * self.head_dim**-0.5  # first, for float16
        first_head = self.tp_rank * q.shape[1]
        stream = self.stream.per_sequence(len(q))
        dropout = ScoreDropout(numbers, self.num_heads, first_head, *stream)
        scores = softcap(matmul(q, k.transpose(-1, -2)), self.cap)
        mask = masking.mask(positions, keys)
        if masking.sinks is None:
            return matmul(masked_softmax(scores, mask, dropout), v)
        # a last key of each query, without a value
        column = masking.sinks.to(scores.dtype)[..., None, None].expand(-1, -1, scores.shape[2], 1)
        mask = None if mask is None else F.pad(mask, (0, 1), value=True)
        p = masked_softmax(torch.cat([scores, column], -1), mask, dropout)
        return matmul(p[..., :-1], v)


def _normed(norm: nn.Module, x: Tensor, first: int) -> Tensor:
    """The norm of x over its dimensions from `first` on, as one."""
    return cast(Tensor, norm(x.reshape(-1, prod(x.shape[first:])))).view(x.shape)


def attend_after(
    prefix: tuple[Tensor, Tensor], qkv: Heads, masking: AttentionMask, inputs: Inputs
) -> Tensor:
    """Attention of b rows to a common prefix [1, g, p, d] and to themselves, merged by log-sum-exp.

    q [b, h, s, d], k and v [b, g, s, d] -> [b, h, s, d]. The prefix is read once for all rows,
    without copies.
    """
    q, k, v = qkv
    b, h, s, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    joined = q.transpose(0, 1).reshape(1, h, b * s, d)
    mask = masking.of_prefix(joined, inputs.positions, prefix[0].shape[2])
    out, lse = attention(joined, *prefix, False, mask, masking.cap)
    out = out.view(h, b, s, d).transpose(0, 1).to(wide).contiguous()
    lse = lse.view(h, b, s).transpose(0, 1).contiguous()
    causal, mask = masking.of_rows(q, prefix[0].shape[2])
    if inputs.paths is not None:
        causal, mask = False, masking.of_paths(inputs.paths, inputs.positions)
    merge_(out, lse, *attention(q, k, v, causal, mask, masking.cap))
    out, _ = with_sinks(out, lse, masking.sinks)
    return out.to(q.dtype)
