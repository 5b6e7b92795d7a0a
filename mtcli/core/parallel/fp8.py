"""Linear layers in float8: how each scaling quantises the operands of the three GEMMs.

| scaling | x, gradients | weight | format of gradients |
|---|---|---|---|
| tensorwise | one scale | one scale | e5m2 (arXiv:2209.05433; torchao's default) |
| rowwise | a scale per row | a scale per row | e4m3 (torchao's rowwise recipe) |
| blockwise | 1 x 128 | 128 x 128 | e4m3 (DeepSeek-V3, arXiv:2412.19437, section 3.3) |

A row runs along the contraction, so x and gradients are quantised twice: by token, and by feature
for the weight's gradient. Activations, weights and results stay bfloat16. T tokens, D and F a
weight's columns and rows on this rank. Ranks compute their own scales and exchange none.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.config.errors import wrong
from mtcli.core.config.fp8 import is_narrow
from mtcli.core.config.schema import Fp8Scaling
from mtcli.kernels.fp8 import (
    BLOCK_1X128,
    BLOCK_128X128,
    PER_ROW,
    PER_TENSOR,
    ScaleBlock,
    fp8_gemm,
    quantize,
)
from mtcli.kernels.gemm import DEFAULT_GEMMS, LinearGemms

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OLDEST = {"tensorwise": (8, 9), "rowwise": (8, 9), "blockwise": (9, 0)}  # compute capabilities
BLOCKWISE_CUDA = (12, 9)  # the oldest whose cublasLt multiplies blocks of 128


class ScalingRecipe(NamedTuple):
    """The scale blocks and formats of one scaling's operands."""

    tokens: ScaleBlock  # of x and of gradients, as they are and transposed
    weight: ScaleBlock
    gradient: torch.dtype
    use_fast_accum: tuple[bool, bool]  # in forwards, in backwards


RECIPES: dict[Fp8Scaling, ScalingRecipe] = {
    "tensorwise": ScalingRecipe(PER_TENSOR, PER_TENSOR, E5M2, (True, False)),
    "rowwise": ScalingRecipe(PER_ROW, PER_ROW, E4M3, (True, True)),
    "blockwise": ScalingRecipe(BLOCK_1X128, BLOCK_128X128, E4M3, (False, False)),
}


def fp8_gemms(scaling: Fp8Scaling) -> LinearGemms:
    """The GEMMs of a linear layer, in float8 where the weight's sizes allow it."""
    return LinearGemms(
        partial(_forward, scaling), partial(_of_x, scaling), partial(_of_weight, scaling)
    )


def require_fp8(device: torch.device, scaling: Fp8Scaling) -> None:
    """Raises MtcliError where a GPU, or torch's CUDA, has no float8 GEMMs with this scaling.

    CPUs emulate them.
    """
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    newest = (9, 0) if scaling == "blockwise" else (99, 0)  # torch has squares on Hopper alone
    if OLDEST[scaling] <= (major, minor) <= newest:
        return _require_cuda(scaling)
    need = ".".join(map(str, OLDEST[scaling])) + (" or more" if newest > (9, 0) else "")
    name = torch.cuda.get_device_name(device)
    message = (
        f"fp8_scaling={scaling!r} takes a GPU of compute capability {need}, "
        f"and {name} has {major}.{minor}"
    )
    other = "train.fp8_scaling = 'rowwise'" if major > 9 else "train.precision = 'bf16'"
    raise wrong(message, other, "train.fp8_scaling")


def _require_cuda(scaling: Fp8Scaling) -> None:
    has = torch.version.cuda or "0.0"
    if scaling == "blockwise" and tuple(map(int, has.split("."))) < BLOCKWISE_CUDA:
        need = ".".join(map(str, BLOCKWISE_CUDA))
        message = (
            f"fp8_scaling='blockwise' takes CUDA {need} or more, and torch was built with {has}"
        )
        hint = f"a wheel of torch for CUDA {need} or more, or train.fp8_scaling = 'rowwise'"
        raise wrong(message, hint, "train.fp8_scaling")


def _forward(scaling: Fp8Scaling, x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    if not _fits(scaling, len(weight_FD), x_TD):
        return DEFAULT_GEMMS.forward(x_TD, weight_FD, bias_F)
    recipe = RECIPES[scaling]
    x, weight = quantize(x_TD, recipe.tokens, E4M3), quantize(weight_FD, recipe.weight, E4M3)
    y_TF = fp8_gemm(x, weight, recipe.use_fast_accum[0])
    return y_TF if bias_F is None else y_TF + bias_F


def _of_x(scaling: Fp8Scaling, grad_TF: Tensor, weight_FD: Tensor) -> Tensor:
    if not _fits(scaling, weight_FD.shape[1], grad_TF):
        return DEFAULT_GEMMS.dgrad(grad_TF, weight_FD)
    recipe = RECIPES[scaling]
    grad = quantize(grad_TF, recipe.tokens, recipe.gradient)
    return fp8_gemm(grad, quantize(weight_FD.T, recipe.weight, E4M3), recipe.use_fast_accum[1])


def _of_weight(scaling: Fp8Scaling, grad_TF: Tensor, x_TD: Tensor) -> Tensor:
    if not _fits(scaling, grad_TF.shape[1], x_TD):
        return DEFAULT_GEMMS.wgrad(grad_TF, x_TD)
    recipe = RECIPES[scaling]
    grad = quantize(grad_TF.T, recipe.tokens, recipe.gradient)
    return fp8_gemm(grad, quantize(x_TD.T, recipe.tokens, E4M3), recipe.use_fast_accum[1])


def _fits(scaling: Fp8Scaling, other: int, x: Tensor) -> bool:
    """Whether x has tokens [T, K], and a weight of K by `other` can be multiplied in float8."""
    return len(x) > 0 and is_narrow(scaling, other, x.shape[1])
