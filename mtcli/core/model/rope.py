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
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


def frequencies(model: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, model.head_dim, 2, device=device).float() / model.head_dim
    plain = 1.0 / model.rope_theta**exponents
    return plain if model.rope_scaling is None else _scaled(plain, model.rope_scaling)


def _scaled(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's scaling: divides the frequencies of long wavelengths by the factor, keeps those of
    short ones, and interpolates in between."""
    turns = scaling.original_max_seq_len * plain / (2.0 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - blend) * plain / scaling.factor + blend * plain
