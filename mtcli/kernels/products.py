"""Matrix products, which on CPU are made in float32 where the operands are float16.

torch has no fast float16 product for most CPUs: [1024, 1024] by [1024, 1024] took 1.8 s on one core
of an EPYC with AVX-512, and 0.02 s in float32. The sums are in float32 either way.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Products(NamedTuple):
    """The three products of a linear layer, of x [T, D], weight [F, D] and gradient [T, F]."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) -> [T, F]
    of_x: Callable[[Tensor, Tensor], Tensor]  # (gradient, weight) -> [T, D]
    of_weight: Callable[[Tensor, Tensor], Tensor]  # (gradient, x) -> [F, D]


PLAIN = Products(F.linear, lambda grad, weight: grad @ weight, lambda grad, x: grad.T @ x)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
) -> Tensor:
    """x weight^T + bias: [..., D] and [F, D] -> [..., F]; `product` is F.linear or like it."""
    if not is_slow(x):
        return product(x, weight, bias)
    wide = None if bias is None else bias.float()
    return product(x.float(), weight.float(), wide).to(x.dtype)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; in float32 where the operands are float16 on a CPU, rounded to float16."""
    return (a.float() @ b.float()).to(a.dtype) if is_slow(a) else a @ b


def is_slow(x: Tensor) -> bool:
    """Whether products of such tensors are better made in float32."""
    return x.dtype == torch.float16 and x.device.type == "cpu"


def float32_precision() -> str:
    """Triton's name of the precision in which torch multiplies float32: "tf32" or "ieee"."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
