"""Quantization to float8 with scales from the operand itself ("current" scaling), and products.

a [M, K] and b [N, K] -> a b^T [M, N] in bfloat16. An operand is cut into blocks, and each block is
scaled so that its largest magnitude is the largest number of the format: e4m3 (448; 3 bits of
mantissa) or e5m2 (57344; 2 bits), arXiv:2209.05433. Sums are in float32. On a GPU the product is
torch's scaled_mm; on CPU the same numbers are multiplied in float32.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.launch import cdiv, operator

LEAST = 2.0**-100  # that a block's magnitude counts as: scale and inverse stay normal float32
STRIP = 128  # columns of a block that is one row high, as GPUs multiply them


class Block(NamedTuple):
    """Rows and columns that share a scale; 0 is all of them."""

    rows: int
    columns: int


WHOLE, ROW, STRIPS, SQUARES = Block(0, 0), Block(1, 0), Block(1, STRIP), Block(STRIP, STRIP)


class Quantized(NamedTuple):
    """An operand [R, K] in float8: a block stands for its values times its scale."""

    values: Tensor
    scales: Tensor  # float32 [blocks of rows, blocks of columns]
    block: Block


def quantize_reference(x_RK: Tensor, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values, scales) of x [R, K] as `Quantized` has them; the last blocks of a dimension may be
    smaller. A block that holds inf or nan has the scale nan.
    """
    rows, columns = x_RK.shape
    high, wide = block.rows or rows, block.columns or columns
    wanting = (0, -columns % wide, 0, -rows % high)
    padded = F.pad(x_RK.float(), wanting) if any(wanting) else x_RK.float()
    tiles = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    largest = tiles.abs().amax((1, 3), keepdim=True).clamp(min=LEAST)
    largest += largest - largest  # inf becomes nan
    top = torch.finfo(dtype).max
    up = torch.full_like(largest, top) / largest  # a number over a tensor would be rounded twice
    values = (tiles * up).to(dtype).view(padded.shape)[:rows, :columns]
    return values.contiguous(), (largest * (1.0 / top))[:, 0, :, 0]


def product_reference(a: Quantized, b: Quantized) -> Tensor:
    """a b^T [M, N], summed in float32 and rounded once to bfloat16."""
    if a.block.columns or b.block.columns:  # scales change along the sum
        return (dequantize(a) @ dequantize(b).T).bfloat16()
    sums_MN = cast_float32(a.values) @ cast_float32(b.values).T
    return sums_MN.mul_(a.scales).mul_(b.scales.T).bfloat16()


def dequantize(x: Quantized) -> Tensor:
    """The float32 numbers [R, K] that an operand stands for."""
    rows, columns = x.values.shape
    high, wide = x.block.rows or rows, x.block.columns or columns
    scales = x.scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return cast_float32(x.values).mul_(scales)


def cast_float32(values: Tensor) -> Tensor:
    """`values.float()` of float8 numbers that are not nan.

    torch casts e4m3 to float32 one by one on CPU: [2048, 1024] took 8.8 ms on a core of an EPYC,
    and by way of float16, which has one more bit of exponent, 1.6 ms.
    """
    if values.dtype == torch.float8_e5m2 or values.device.type != "cpu":
        return values.float()
    bits = values.view(torch.int8).to(torch.int16)  # the sign in bits 15 to 7
    return (bits << 7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)


def quantize(x_RK: Tensor, block: Block, dtype: torch.dtype) -> Quantized:
    """x [R, K], of any strides, in float8: `dtype` is torch's e4m3fn or e5m2."""
    values, scales = _quantize(x_RK, *block, dtype == torch.float8_e5m2)
    return Quantized(values, scales, block)


def product(a: Quantized, b: Quantized, use_fast_accum: bool = False) -> Tensor:
    """`product_reference`; on a GPU 2 * M * N * K operations of its float8 units.

    `use_fast_accum` lets a Hopper GPU keep a sum in fewer bits than float32 until its end, as
    torchao does in forwards; blocks of 128 never do. Operands are padded with zeros to the
    multiples of rows and columns that torch takes, and the result is cut to [M, N] again.
    """
    return _product(a.values, a.scales, a.block, b.values, b.scales, b.block, use_fast_accum)


def _run_quantize(x: Tensor, rows: int, columns: int, e5m2: bool) -> tuple[Tensor, Tensor]:
    make = _fused() if x.is_cuda else quantize_reference
    return make(x, Block(rows, columns), _dtype(e5m2))


@cache
def _fused() -> Callable[..., tuple[Tensor, Tensor]]:
    """`quantize_reference` as torch.compile fuses it: op by op it moves ten times the bytes."""
    return torch.compile(quantize_reference, dynamic=True)


def _fake_quantize(x: Tensor, rows: int, columns: int, e5m2: bool) -> tuple[Tensor, Tensor]:
    r, k = x.shape
    blocks = (cdiv(r, rows or r), cdiv(k, columns or k))
    return x.new_empty(r, k, dtype=_dtype(e5m2)), x.new_empty(blocks, dtype=torch.float32)


def _dtype(e5m2: bool) -> torch.dtype:
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


def _run_product(
    a: Tensor, scales_a: Tensor, block_a: list[int],
    b: Tensor, scales_b: Tensor, block_b: list[int], use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    operands = Quantized(a, scales_a, Block(*block_a)), Quantized(b, scales_b, Block(*block_b))
    return _by_scaled_mm(*operands, use_fast_accum) if a.is_cuda else product_reference(*operands)


def _by_scaled_mm(a: Quantized, b: Quantized, use_fast_accum: bool) -> Tensor:
    """torch's product, which takes b^T with whole columns in memory."""
    rows, columns, blocked = len(a.values), len(b.values), a.block == STRIPS
    a, b = _padded(a, 4 if blocked else 1), _padded(b, 16)
    if not blocked:  # [M, 1] and [1, N]; of one number for all [1, 1] twice
        scales_b = b.scales.T.contiguous()
        out = torch._scaled_mm(
            a.values, b.values.T, a.scales, scales_b,
            out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum,
        )  # fmt: skip
        return out[:, :columns]
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    out = F.scaled_mm(
        a.values, b.values.T,
        _scales_for_cublas(a), kinds[0], _scales_for_cublas(b), kinds[b.block == SQUARES],
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out[:rows, :columns]


def _padded(x: Quantized, rows: int) -> Quantized:
    """x padded with zeros to a multiple of `rows` rows, and of 16 columns or a block's."""
    up, along = -len(x.values) % rows, -x.values.shape[1] % (x.block.columns or 16)
    if not up and not along:
        return x
    bits = F.pad(x.values.view(torch.uint8), (0, along, 0, up))
    scales = x.scales if x.block == WHOLE else F.pad(x.scales, (0, 0, 0, up), value=1.0)
    return Quantized(bits.view(x.values.dtype), scales, x.block)


def _scales_for_cublas(x: Quantized) -> Tensor:
    """Scales in cuBLAS's memory order: of strips column by column; of squares row by row, with rows
    of a multiple of 4."""
    if x.block == STRIPS:
        return x.scales.T.contiguous().T
    return F.pad(x.scales, (0, -x.scales.shape[1] % 4)).T


_quantize = operator(
    "fp8_quantize(Tensor x, int rows, int columns, bool e5m2) -> (Tensor, Tensor)",
    _run_quantize,
    _fake_quantize,
)
_product = operator(
    "fp8_product(Tensor a, Tensor scales_a, int[] block_a, "
    "Tensor b, Tensor scales_b, int[] block_b, bool use_fast_accum) -> Tensor",
    _run_product,
    lambda a, scales_a, block_a, b, scales_b, block_b, use_fast_accum: a.new_empty(
        len(a), len(b), dtype=torch.bfloat16
    ),
)
