"""Rotary positions (arXiv:2104.09864), half-split as in Hugging Face's Llama."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.config.model import ModelConfig, RopeScaling
from mtcli.kernels.rope import rotate


class RotaryTable(NamedTuple):
    """Cosines and sines of a micro-batch's positions, [b, 1, s, head_dim] in the model's dtype."""

    cos: Tensor
    sin: Tensor

    def __call__(self, q_bhsd: Tensor, k_bgsd: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys: dimensions i and i + head_dim / 2 are a pair."""
        return rotate(q_bhsd, k_bgsd, self.cos, self.sin)


def rotary_table(model: ModelConfig, positions_bs: Tensor, dtype: torch.dtype) -> RotaryTable:
    """The cosines and sines of each position, with angles in float32 as Hugging Face's are."""
    angles = positions_bs[:, None, :, None].float() * frequencies(model, positions_bs.device)
    angles = torch.cat([angles, angles], -1)
    cos, sin, factor = angles.cos(), angles.sin(), _attention_factor(model.rope_scaling)
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return RotaryTable(cos.to(dtype), sin.to(dtype))


def frequencies(model: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, model.head_dim, 2, device=device).float() / model.head_dim
    plain, scaling = 1.0 / model.rope_theta**exponents, model.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    share = _llama3(plain, scaling) if scaling.kind == "llama3" else _yarn(plain, model, scaling)
    return share * plain + (1.0 - share) * plain / scaling.factor


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """The share of each frequency [head_dim / 2] that is kept, beside the share that is divided by
    the factor: 1 for short wavelengths, 0 for long ones, and linear in between (Llama 3.1)."""
    turns = scaling.original_max_seq_len * plain / (2.0 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _yarn(plain: Tensor, model: ModelConfig, scaling: RopeScaling) -> Tensor:
    """The share of each frequency [head_dim / 2] that is kept: it falls linearly with the number of
    the pair, from 1 at beta_fast to 0 at beta_slow (arXiv:2309.00071, section 3.2)."""

    def pair(turns: float) -> float:
        """The number of the pair, a fraction, that makes so many turns in the original context."""
        wavelengths = scaling.original_max_seq_len / (turns * 2.0 * math.pi)
        return model.head_dim * math.log(wavelengths) / (2.0 * math.log(model.rope_theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.head_dim - 1)
    width = last - first or 0.001
    pairs = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    return 1.0 - ((pairs - first) / width).clamp(0.0, 1.0)


def _attention_factor(scaling: RopeScaling | None) -> float:
    """The factor of rotated queries and keys, which YaRN scales (arXiv:2309.00071, section 3.4)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    growth = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (scaling.mscale * growth + 1.0) / (scaling.mscale_all_dim * growth + 1.0)
    return growth + 1.0
