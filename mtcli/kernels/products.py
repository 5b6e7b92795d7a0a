"""Matrix products, which some CPUs make sooner in float32 than in 16 bits.

Few CPUs are quick at float16, and none much quicker than at float32; `choose_products` tells those
that are quick at bfloat16 (benchmarks/bench_products.py measures both). The sums are in float32
either way, and tensors stay in 16 bits between products.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_IN_FLOAT32 = {torch.float16}  # on a CPU


class Products(NamedTuple):
    """The three products of a linear layer, of x [T, D], weight [F, D] and gradient [T, F]."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) -> [T, F]
    of_x: Callable[[Tensor, Tensor], Tensor]  # (gradient, weight) -> [T, D]
    of_weight: Callable[[Tensor, Tensor], Tensor]  # (gradient, x) -> [F, D]


def choose_products() -> None:
    """Makes bfloat16's products in float32 from now on, where this CPU is better at those.

    AMX and AMD's AVX-512 multiply bfloat16 quicker than float32, Intel's AVX-512 at half of its
    rate, CPUs without instructions for it at a fifth (AVX-512) or a twelfth (AVX2).
    """
    can = torch.cpu.get_capabilities()
    quick = ("amx_bf16", "bf16", "sve_bf16")  # the latter two are ARM's
    of_amd = can.get("avx512_bf16") and "Intel" not in can.get("cpu_name", "")
    widen_bfloat16(not (of_amd or any(can.get(name) for name in quick)))


def widen_bfloat16(yes: bool) -> bool:
    """Has bfloat16's products made in float32 on CPU, or not; returns what was so before."""
    before = torch.bfloat16 in _IN_FLOAT32
    (_IN_FLOAT32.add if yes else _IN_FLOAT32.discard)(torch.bfloat16)
    return before


def product_dtype(x: Tensor) -> torch.dtype:
    """What products of such tensors are made in: their own dtype, or float32."""
    return torch.float32 if x.device.type == "cpu" and x.dtype in _IN_FLOAT32 else x.dtype


def is_slow(x: Tensor) -> bool:
    """Whether products of such tensors are better made in float32."""
    return product_dtype(x) != x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias: [..., D] and [F, D] -> [..., F]."""
    if not is_slow(x):
        return F.linear(x, weight, bias)
    y = LinearBy.apply(x.reshape(-1, x.shape[-1]), weight, bias, PLAIN)
    return y.view(*x.shape[:-1], len(weight))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, rounded to a's dtype once."""
    return _Matmul.apply(a, b) if is_slow(a) and torch.is_grad_enabled() else _product(a, b)


def float32_precision() -> str:
    """Triton's name of the precision in which torch multiplies float32: "tf32" or "ieee"."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = product_dtype(x)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(
        x.dtype
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    wide = product_dtype(a)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


PLAIN = Products(_forward, _product, lambda grad, x: _product(grad.T, x))


class LinearBy(torch.autograd.Function):
    """A linear layer by given products, which keeps its operands as they are."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products
    ) -> Tensor:
        """x [T, D], weight [F, D] (or what `products` takes) -> [T, F]."""
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return products.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias, where they are wanted."""
        (x, weight), (of_x, of_weight, of_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            ctx.products.of_x(grad, weight) if of_x else None,
            ctx.products.of_weight(grad, x) if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
        )


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _product(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _product(grad, b.mT), _product(a.mT, grad)
