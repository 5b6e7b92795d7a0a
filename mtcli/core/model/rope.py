"""Rotary positions (arXiv:2104.09864), half-split as in Hugging Face's Llama.

The first r = model.rotary_dim dimensions of a head rotate.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.config.model import ModelConfig, RopeScaling
from mtcli.kernels.rope import rotate, split_rotated
from mtcli.kernels.triton_launch import runs_triton


class RotaryTable(NamedTuple):
    """Cosines and sines of a micro-batch's positions, [b, 1, s, r] in the model's dtype."""

    cos: Tensor
    sin: Tensor

    def __call__(self, q_bhsd: Tensor, k_bgsd: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys: dimensions i and i + r / 2 are a pair."""
        r, d = self.cos.shape[-1], q_bhsd.shape[-1]
        if r == d:
            return rotate(q_bhsd, k_bgsd, self.cos, self.sin)
        (q, q_rest), (k, k_rest) = (x.split([r, d - r], -1) for x in (q_bhsd, k_bgsd))
        q, k = rotate(q, k, self.cos, self.sin)
        return torch.cat([q, q_rest], -1), torch.cat([k, k_rest], -1)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits fused projections [b, s, g, r + 2, d] into rotated queries and keys, and values
        [b, heads, s, d], in one launch; for `splits` alone."""
        return split_rotated(qkv, self.cos, self.sin)

    def splits(self, qkv: Tensor) -> bool:
        """Whether a kernel rotates whole heads of fused projections."""
        eager = not torch.compiler.is_compiling()
        return eager and self.cos.shape[-1] == qkv.shape[-1] and runs_triton(qkv)


def halves(x_bhsd: Tensor, r: int) -> Tensor:
    """Reorders the first r dimensions so that the pairs 2i and 2i + 1 are i and i + r / 2. Scores
    stay the same, as queries and keys are reordered alike."""
    pairs, unrotated = x_bhsd.split([r, x_bhsd.shape[-1] - r], -1)
    return torch.cat([pairs[..., ::2], pairs[..., 1::2], unrotated], -1)


def layer_table(model: ModelConfig, layer: int) -> int | None:
    """The number of a layer's table in `rotary_tables`; None where it rotates nothing."""
    if not model.layer_rotates(layer):
        return None
    return int(model.rope_local_theta > 0.0 and model.layer_window(layer) > 0)


def rotary_tables(
    model: ModelConfig, positions_bs: Tensor, dtype: torch.dtype, context: int
) -> tuple[RotaryTable, ...]:
    """The table of the layers, and that of local ones where these have a base of their own.

    Scalings that depend on the length of sequences read `context`, which is the same for all
    micro-batches of a run.
    """
    bases = [(model.rope_theta, model.rope_scaling)]
    if model.rope_local_theta > 0.0:
        bases.append((model.rope_local_theta, None))
    dim, tables = model.rotary_dim, []
    for theta, scaling in bases:
        radians = frequencies(dim, theta, scaling, context, positions_bs.device)
        angles = positions_bs[:, None, :, None].float() * radians
        tables.append(_table(angles, attention_factor(scaling), dtype))
    return tuple(tables)


def _table(angles: Tensor, factor: float, dtype: torch.dtype) -> RotaryTable:
    """The cosines and sines of angles [b, 1, s, r / 2] in float32, as Hugging Face's are."""
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return RotaryTable(cos.to(dtype), sin.to(dtype))


def frequencies(
    dim: int, theta: float, scaling: RopeScaling | None, context: int, device: torch.device
) -> Tensor:
    """Radians per position of each pair of the dimensions, float32 [r / 2]."""
    exponents = torch.arange(0, dim, 2, device=device).float() / dim
    if scaling is not None and scaling.kind == "dynamic":
        growth = scaling.factor * context / scaling.original_max_seq_len - (scaling.factor - 1.0)
        theta *= max(1.0, growth) ** (dim / (dim - 2))
    plain = 1.0 / theta**exponents
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "longrope":
        is_long = context > scaling.original_max_seq_len
        factors = scaling.long_factors if is_long else scaling.short_factors
        return 1.0 / (torch.tensor(factors, device=device) * theta**exponents)
    if scaling.kind == "linear":
        return plain / scaling.factor
    share = _llama3(plain, scaling) if scaling.kind == "llama3" else _yarn(plain, theta, scaling)
    return share * plain + (1.0 - share) * plain / scaling.factor


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """The share of each frequency [r / 2] that is kept, beside the share that is divided by the
    factor: 1 for short wavelengths, 0 for long ones, and linear in between (Llama 3.1)."""
    turns = scaling.original_max_seq_len * plain / (2.0 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _yarn(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """The share of each frequency [r / 2] that is kept: it falls linearly with the number of the
    pair, from 1 at beta_fast to 0 at beta_slow (arXiv:2309.00071, section 3.2)."""
    dim = 2 * len(plain)

    def pair(turns: float) -> float:
        """The number of the pair, a fraction, that makes so many turns in the original context."""
        wavelengths = scaling.original_max_seq_len / (turns * 2.0 * math.pi)
        return dim * math.log(wavelengths) / (2.0 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    pairs = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    return 1.0 - ((pairs - first) / width).clamp(0.0, 1.0)


def score_growth(scaling: RopeScaling | None) -> float:
    """The factor by which YaRN scales queries and keys of latent attention (DeepSeek's
    mscale_all_dim)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return scaling.mscale_all_dim * 0.1 * math.log(scaling.factor) + 1.0


def attention_factor(scaling: RopeScaling | None) -> float:
    """The factor of rotated queries and keys, which YaRN and LongRoPE scale (arXiv:2309.00071,
    section 3.4; arXiv:2402.13753)."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        return math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_max_seq_len))
    growth = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (scaling.mscale * growth + 1.0) / (scaling.mscale_all_dim * growth + 1.0)
    return growth + 1.0
