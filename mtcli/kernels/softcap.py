"""Soft caps of logits and attention scores: cap * tanh(x / cap) (arXiv:2408.00118, section 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels.triton_launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in x's dtype; x itself where the cap is 0."""
    return torch.tanh(x / cap) * cap if cap else x


def softcap_slope(capped: Tensor, cap: float) -> Tensor:
    """The derivative of `softcap` where its result is `capped`."""
    return 1.0 - (capped / cap).square_()


@kernel()
def tanh(x):
    """tanh(x) by one exponential."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@kernel()
def bent(s, bend, CAPPED: tl.constexpr):
    """tanh(bend * s) where scores are CAPPED, else s."""
    return tanh(s * bend) if CAPPED else s


@kernel()
def through_bend(grad, s, CAPPED: tl.constexpr):
    """The gradient of scores from that of `bent` scores s, without the factor `bend`."""
    return grad * (1.0 - s * s) if CAPPED else grad
