"""Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1): the keys and values of all
heads are made from one narrow latent of each token, which is all that a cache keeps.

[c, r] = W_kv_down x, [k, v] = W_kv_up norm(c): a head's key is [k, R(r)], whose rotated part R(r)
is one for all heads. Its query is [q, R(q_r)] = W_q_up norm(W_q_down x), or W_q x without a latent.

b sequences of s tokens, T = b * s; h heads of this rank; D hidden.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.core.config.model import Mla, ModelConfig
from mtcli.core.model.attention import Attention
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.rope import score_growth
from mtcli.core.parallel.factory import LayerFactory


class LatentAttention(Attention):
    """Attention whose keys and values are made from latents.

    Tensor parallel ranks replicate the down-projections and shard heads. Latents and the common
    part of keys pass one boundary to the heads: under sequence parallelism an all-gather of
    latents, which are narrower than the residual stream. The rows of a grid of tp ranks replicate
    the up-projections too, each rank those of its heads. Kernels take queries, keys and values of
    one width, so the narrower ones are padded with zeros.
    """

    def __init__(self, layer: int, model: ModelConfig, build: LayerFactory, seed: int) -> None:
        super().__init__(layer, model, build, seed)
        self.head_dim = model.padded_head_dim
        grown = model.head_dim**-0.5 * score_growth(model.rope_scaling) ** 2
        scale = model.attention_scale or grown
        self.query_scale = scale * self.head_dim**0.5
        self.enter, self.tp = build.enter_latents, build.groups.tp
        self.to_tokens, self.activation_rows = build.to_tokens, build.activation_rows

    @property
    def cached_numbers(self) -> int:
        """How many numbers of a token a cache keeps on this rank: a latent, and what heads have in
        common."""
        return self.mla.kv_rank + self.mla.rope_dim

    def make_projections(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        """Makes the down-projections, their norms and the up-projections."""
        self.mla = mla = cast(Mla, model.mla)
        latent = model.model_copy(update={"norm": "rmsnorm", "norm_eps": mla.norm_eps})
        if mla.q_rank:
            self.q_down = build.down_linear(f"{name}.q_down")
            self.q_norm = build.norm(f"{name}.q_norm", latent)
            self.q_up = build.up_linear(f"{name}.q_up")
        else:
            self.q = build.column_linear(f"{name}.q")
        self.kv_down = build.down_linear(f"{name}.kv_down")
        self.kv_norm = build.norm(f"{name}.kv_norm", latent)
        self.kv_up = build.up_linear(f"{name}.kv_up")

    def project(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """x_TD [T/tp, D] -> this rank's queries, the latent, the common part of keys, in one
        [T, h * (nope + rope) + kv_rank + rope]."""
        mla, numbers = self.mla, inputs.numbers
        if numbers is not None:  # of the tokens in x_TD
            numbers = self.activation_rows(numbers.flatten())
        tokens_TD = self.to_tokens(x_TD)
        narrow = self.kv_down(tokens_TD, numbers=numbers)
        latent, common = narrow.split([mla.kv_rank, mla.rope_dim], -1)
        kv = self.kv_norm(latent.contiguous()), common
        if not mla.q_rank:
            q = self.q(x_TD, numbers=inputs.numbers)
            return torch.cat([q, self.enter(torch.cat(kv, -1), self.tp)], -1)
        of_queries = self.q_norm(self.q_down(tokens_TD, numbers=numbers))
        latents = torch.cat([of_queries, *kv], -1)
        sizes = [mla.q_rank, mla.kv_rank + mla.rope_dim]
        of_queries, of_keys = self.enter(latents, self.tp).split(sizes, -1)
        q = self.q_up(of_queries, numbers=inputs.numbers, has_entered=True)
        return torch.cat([q, of_keys], -1)

    def mix(self, qkv_TF: Tensor, inputs: Inputs) -> Tensor:
        """Mixes values: queries, latents and keys of `project` -> [T, h * value]."""
        (b, s), mla = inputs.shape, self.mla
        narrow = mla.kv_rank + mla.rope_dim
        sizes = [qkv_TF.shape[-1] - narrow, mla.kv_rank, mla.rope_dim]
        q, latent, common = qkv_TF.view(b, s, -1).split(sizes, -1)
        q = q.unflatten(2, (-1, mla.nope_dim + mla.rope_dim)).transpose(1, 2)
        q, rotated = q.split([mla.nope_dim, mla.rope_dim], -1)
        latent, common = latent[:, None], common[:, None]  # [b, 1, s, width]
        rotated, common = self.rotated(rotated, common, inputs)
        q = self._padded(torch.cat([q, rotated], -1))
        if self.query_scale != 1.0:
            q = q * self.query_scale
        if inputs.cache is not None:
            latent, common = inputs.cache.extend(self.layer, latent, common)
        k, v = self.expanded(latent, common, inputs.numbers)
        mixed = self._attend(q, k, v, inputs)[..., : mla.value_dim]
        return mixed.transpose(1, 2).reshape(b * s, -1)

    def expanded(
        self, latent: Tensor, common: Tensor, numbers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Latents [b, 1, s, kv_rank] and the rotated part of keys [b, 1, s, rope] -> keys and
        values of this rank's heads [b, h, s, width]."""
        mla, (b, _, s, _) = self.mla, latent.shape
        kv = self.kv_up(latent.flatten(0, 2), numbers=numbers, has_entered=True)
        kv = kv.view(b, s, -1, mla.nope_dim + mla.value_dim).transpose(1, 2)
        k, v = kv.split([mla.nope_dim, mla.value_dim], -1)
        k = torch.cat([k, common.expand(-1, k.shape[1], -1, -1)], -1)
        return self._padded(k), self._padded(v)

    def _padded(self, x: Tensor) -> Tensor:
        missing = self.head_dim - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x
