"""GEMMs of 16-bit tensors, which some CPUs compute faster in float32.

Few CPUs are fast in float16, and none much faster than in float32, so float16 GEMMs run in float32;
for bfloat16 `choose_gemm_dtype` decides (benchmarks/bench_gemm.py measures both). Sums are in
float32 either way, and tensors stay in 16 bits between GEMMs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.gradient_sink import GradientSink
from mtcli.kernels.limits import IS_INTEL

# The dtype of weights and activations, by train.precision.
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # of all but the operands of linear layers
}
FEW_TOKENS, LARGE_WEIGHT = 128, 2**18  # of float32 on a CPU: see `adds_to`
# Dtypes whose GEMMs a CPU computes in float32. Process-wide like torch's own float32 matmul
# precision: backwards and compiled graphs, which nothing can be passed to, read it too.
_IN_FLOAT32 = {torch.float16}


class LinearGemms(NamedTuple):
    """The three GEMMs of a linear layer with x [T, D], weight [F, D] and gradient [T, F]."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) -> [T, F]
    dgrad: Callable[[Tensor, Tensor], Tensor]  # (gradient, weight) -> [T, D]
    wgrad: Callable[[Tensor, Tensor], Tensor]  # (gradient, x) -> [F, D]
    # (sink, gradient, x) adds wgrad; None where no GEMM does both
    add_wgrad: Callable[[GradientSink, Tensor, Tensor], None] | None = None


# A function that computes a weight's gradient; None from it means that the gradient is in its sink.
MakeGradient = Callable[[], Tensor | None]
# (weight, function that computes its gradient) -> the gradient; None if it is in its sink, or
# deferred to the W pass of a zero-bubble schedule.
DeferGradient = Callable[[Tensor, MakeGradient], Tensor | None]


def choose_gemm_dtype() -> None:
    """Has this process compute bfloat16 GEMMs in float32, where that is faster on this CPU.

    AMX and AMD's AVX-512 multiply bfloat16 faster than float32; Intel's AVX-512 at half the rate of
    float32; CPUs without bfloat16 instructions at a fifth (AVX-512) or a twelfth (AVX2).
    """
    can = torch.cpu.get_capabilities()
    quick = ("amx_bf16", "bf16", "sve_bf16")  # the latter two are ARM's
    of_amd = can.get("avx512_bf16") and not IS_INTEL
    set_bfloat16_in_float32(not (of_amd or any(can.get(name) for name in quick)))


def set_bfloat16_in_float32(yes: bool) -> bool:
    """Sets whether bfloat16 GEMMs on CPU run in float32; returns the previous setting."""
    previous = torch.bfloat16 in _IN_FLOAT32
    (_IN_FLOAT32.add if yes else _IN_FLOAT32.discard)(torch.bfloat16)
    return previous


def gemm_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which GEMMs of tensors like x are computed: its own, or float32."""
    return torch.float32 if x.device.type == "cpu" and x.dtype in _IN_FLOAT32 else x.dtype


def runs_in_float32(x: Tensor) -> bool:
    """Whether x is a 16-bit tensor whose GEMMs are computed in float32."""
    return gemm_dtype(x) != x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias: [..., D] and [F, D] -> [..., F]."""
    if not runs_in_float32(x):
        return F.linear(x, weight, bias)
    y = LinearFunction.apply(x.reshape(-1, x.shape[-1]), weight, bias, DEFAULT_GEMMS)
    return y.view(*x.shape[:-1], len(weight))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, rounded once to a's dtype."""
    if runs_in_float32(a) and torch.is_grad_enabled():
        return _MatmulFunction.apply(a, b)
    return _matmul(a, b)


def matmul_into(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """out = a @ b + bias, of matrices, outside of autograd."""
    if runs_in_float32(a):
        out.copy_(_forward(a, b.T, bias))
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def add_matmul_(total: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> Tensor:
    """beta * total + a @ b, without rounding the product where total is wider than a and b.

    Matrices, or equally many of each. Returns total, whose values are not read if beta is 0.
    """
    add = torch.addmm if total.dim() == 2 else torch.baddbmm
    if total.dtype == a.dtype:
        return add(total, a, b, beta=beta, out=total)
    if a.device.type == "cpu":  # torch has no such product there
        return add(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)
    return add(total, a, b, beta=beta, out_dtype=total.dtype, out=total)


def adds_to(x: Tensor, weight: Tensor, total: torch.dtype) -> bool:
    """Whether a linear layer's gradient is added to a sum of dtype `total` by its GEMM: on a GPU,
    and on a CPU where that is faster than a pass.

    On a core of an EPYC 64 tokens of float32 in [4096, 1024] took two thirds of the time, 512 in
    [3072, 768] as long, and all of a tiny model's step 1.15 times as long, as autograd's functions
    in Python take 0.1 ms. A bfloat16 GEMM takes half as long as the same in float32 into the sum.
    """
    if x.device.type != "cpu":
        return True
    if gemm_dtype(x) != total:
        return False
    if x.dtype != torch.float32:  # cast for its GEMMs anyway, or float64, which is for comparisons
        return True
    return x.numel() // x.shape[-1] <= FEW_TOKENS and weight.numel() >= LARGE_WEIGHT


def float32_precision() -> str:
    """Triton's name of the precision in which torch multiplies float32.

    For "highest" it is "tf32x3": three GEMMs on tensor cores, as accurate as one float32 GEMM,
    which "ieee" would run on other cores at a sixth of the rate.
    """
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = gemm_dtype(x)
    bias = None if bias is None else bias.to(wide)
    return F.linear(x.to(wide), weight.to(wide), bias).to(x.dtype)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    wide = gemm_dtype(a)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


def add_weight_gradient_(sink: GradientSink, grad: Tensor, x: Tensor) -> None:
    """Adds grad^T x to a sink in one GEMM, or in one for each owner's rows.

    On a GPU those of several owners are a batch where they have equally many rows, as one owner's
    may be too few to keep it busy.
    """
    beta, (owners, rows_each, _) = sink.begin(), sink.blocks_ORD.shape
    if owners > 1 and sink.rows == owners * rows_each and grad.device.type != "cpu":
        add_batch_(sink, grad, x, beta)
    else:
        add_gemms_(sink, grad, x, beta)


def add_gemms_(sink: GradientSink, grad: Tensor, x: Tensor, beta: int) -> None:
    """beta times a sink's rows plus grad^T x, in a GEMM for each of its owners."""
    if grad.device.type == "cpu":  # once for all of them
        grad, x = grad.to(sink.dtype), x.to(sink.dtype)
    for rows_RD, rows in sink.owned_rows():
        add_matmul_(rows_RD, grad[:, rows].T, x, beta)


def add_batch_(sink: GradientSink, grad: Tensor, x: Tensor, beta: int) -> None:
    """`add_gemms_` of owners with equally many rows, as a batch."""
    owners, rows_each, _ = sink.blocks_ORD.shape
    g_ORT = grad.T.unflatten(0, (owners, rows_each))
    add_matmul_(sink.blocks_ORD, g_ORT, x.expand(owners, *x.shape), beta)


DEFAULT_GEMMS = LinearGemms(
    _forward, _matmul, lambda grad, x: _matmul(grad.T, x), add_weight_gradient_
)


class LinearFunction(torch.autograd.Function):
    """A linear layer with given GEMMs, which saves its operands in their own dtypes."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no containers of tensors
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemms: LinearGemms,
        defer: DeferGradient | None = None,
        sink: GradientSink | None = None,
    ) -> Tensor:
        """x [T, D], weight [F, D] (or what `gemms` takes) -> [T, F]."""
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.gemms, ctx.defer, ctx.sink = gemms, defer, sink
        return gemms.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias, of those that need one."""
        (x, weight), (of_x, of_weight, of_bias, *_) = ctx.saved_tensors, ctx.needs_input_grad
        to = ctx.defer, ctx.sink
        return (
            ctx.gemms.dgrad(grad, weight) if of_x else None,
            weight_gradient(ctx.gemms, *to, weight, grad, x) if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
            None,
            None,
        )


def weight_gradient(  # noqa: PLR0913
    gemms: LinearGemms,
    defer: DeferGradient | None,
    sink: GradientSink | None,
    weight: Tensor,
    grad: Tensor,
    x: Tensor,
) -> Tensor | None:
    """The gradient of a linear layer's weight; None where it is in the sink, or `defer` leaves it
    to the W pass."""
    # Detached: its graph leads to the stage's input and that one's gradient.
    x = x.detach()
    if sink is None or gemms.add_wgrad is None:
        make: MakeGradient = partial(gemms.wgrad, grad, x)
    else:
        make = partial(gemms.add_wgrad, sink, grad, x)
    return make() if defer is None else defer(weight, make)


class _MatmulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _matmul(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _matmul(grad, b.mT), _matmul(a.mT, grad)
