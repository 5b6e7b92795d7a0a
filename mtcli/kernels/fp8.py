"""Float8 quantization with scales from the operand itself ("current" scaling), and its GEMM.

a [M, K] and b [N, K] -> a b^T [M, N] in bfloat16. Each block of an operand is scaled so that its
largest magnitude is the largest number of the format: e4m3 (448; 3 bits of mantissa) or e5m2
(57344; 2 bits), arXiv:2209.05433. Sums are in float32. On a GPU the GEMM is torch's scaled_mm; on
CPU the same numbers are multiplied in float32.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.launch import cdiv

# The least magnitude of a block, so that its scale and the inverse are normal float32.
LEAST = 2.0**-100


class ScaleBlock(NamedTuple):
    """Rows and columns that share a scale; 0 is all of them."""

    rows: int
    columns: int


PER_TENSOR, PER_ROW = ScaleBlock(0, 0), ScaleBlock(1, 0)
BLOCK_1X128, BLOCK_128X128 = ScaleBlock(1, 128), ScaleBlock(128, 128)


class Fp8Operand(NamedTuple):
    """An operand [R, K] in float8, with a scale for each block."""

    values: Tensor
    scales: Tensor  # float32 [blocks of rows, blocks of columns]
    block: ScaleBlock


def quantize_reference(
    x_RK: Tensor, block: ScaleBlock, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Quantizes x [R, K] to the values and scales of `Fp8Operand`.

    The last blocks of a dimension may be smaller. A block with inf or nan has the scale nan.
    """
    rows, columns = x_RK.shape
    high, wide = block.rows or rows, block.columns or columns
    wanting = (0, -columns % wide, 0, -rows % high)
    padded = F.pad(x_RK.float(), wanting) if any(wanting) else x_RK.float()
    tiles = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    largest = tiles.abs().amax((1, 3), keepdim=True).clamp(min=LEAST)
    # inf becomes nan.
    largest += largest - largest
    top = torch.finfo(dtype).max
    # A number over a tensor would be rounded twice.
    up = torch.full_like(largest, top) / largest
    values = (tiles * up).to(dtype).view(padded.shape)[:rows, :columns]
    return values.contiguous(), (largest * (1.0 / top))[:, 0, :, 0]


def fp8_gemm_reference(a: Fp8Operand, b: Fp8Operand) -> Tensor:
    """a b^T [M, N], summed in float32 and rounded once to bfloat16."""
    # Such scales change along the sum.
    if a.block.columns or b.block.columns:
        return (dequantize(a) @ dequantize(b).T).bfloat16()
    sums_MN = cast_float32(a.values) @ cast_float32(b.values).T
    return sums_MN.mul_(a.scales).mul_(b.scales.T).bfloat16()


def dequantize(x: Fp8Operand) -> Tensor:
    """Multiplies values by their scales: float32 [R, K]."""
    rows, columns = x.values.shape
    high, wide = x.block.rows or rows, x.block.columns or columns
    scales = x.scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return cast_float32(x.values).mul_(scales)


def cast_float32(values: Tensor) -> Tensor:
    """Casts float8 numbers that are not nan to float32, as `values.float()`.

    torch casts e4m3 to float32 one by one on CPU: [2048, 1024] took 8.8 ms on a core of an EPYC,
    and by way of float16, which has one more bit of exponent, 1.6 ms.
    """
    if values.dtype == torch.float8_e5m2 or values.device.type != "cpu":
        return values.float()
    # Widened, the sign is in bits 15 to 7.
    bits = values.view(torch.int8).to(torch.int16)
    return (bits << 7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)


def quantize(x_RK: Tensor, block: ScaleBlock, dtype: torch.dtype) -> Fp8Operand:
    """Quantizes x [R, K], of any strides, to float8: `dtype` is torch's e4m3fn or e5m2."""
    values, scales = _quantize(x_RK, *block, dtype == torch.float8_e5m2)
    return Fp8Operand(values, scales, block)


def fp8_gemm(a: Fp8Operand, b: Fp8Operand, use_fast_accum: bool = False) -> Tensor:
    """`fp8_gemm_reference`; on a GPU 2 * M * N * K operations of its float8 units.

    `use_fast_accum` lets a Hopper GPU keep a sum in fewer bits than float32 until its end, as
    torchao does in forwards; blocks of 128 never do. Operands are padded with zeros to the
    multiples of rows and columns that torch takes, and the result is cut to [M, N] again.
    """
    return _fp8_gemm(a.values, a.scales, a.block, b.values, b.scales, b.block, use_fast_accum)


def _fake_quantize(x: Tensor, rows: int, columns: int, e5m2: bool) -> tuple[Tensor, Tensor]:
    r, k = x.shape
    blocks = (cdiv(r, rows or r), cdiv(k, columns or k))
    return x.new_empty(r, k, dtype=_dtype(e5m2)), x.new_empty(blocks, dtype=torch.float32)


@custom_op(
    "fp8_quantize(Tensor x, int rows, int columns, bool e5m2) -> (Tensor, Tensor)",
    fake=_fake_quantize,
)
def _quantize(x, rows, columns, e5m2):
    make = _fused() if x.is_cuda else quantize_reference
    return make(x, ScaleBlock(rows, columns), _dtype(e5m2))


@cache
def _fused() -> Callable[..., tuple[Tensor, Tensor]]:
    """`quantize_reference` as torch.compile fuses it: op by op it moves ten times the bytes."""
    return torch.compile(quantize_reference, dynamic=True)


def _dtype(e5m2: bool) -> torch.dtype:
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


@custom_op(
    "fp8_product(Tensor a, Tensor scales_a, int[] block_a, "
    "Tensor b, Tensor scales_b, int[] block_b, bool use_fast_accum) -> Tensor",
    fake=lambda a, scales_a, block_a, b, scales_b, block_b, use_fast_accum: a.new_empty(
        len(a), len(b), dtype=torch.bfloat16
    ),
)
def _fp8_gemm(a, scales_a, block_a, b, scales_b, block_b, use_fast_accum):
    operands = (
        Fp8Operand(a, scales_a, ScaleBlock(*block_a)),
        Fp8Operand(b, scales_b, ScaleBlock(*block_b)),
    )
    return _scaled_mm(*operands, use_fast_accum) if a.is_cuda else fp8_gemm_reference(*operands)


def _scaled_mm(a: Fp8Operand, b: Fp8Operand, use_fast_accum: bool) -> Tensor:
    """torch's scaled GEMMs, which take b^T column by column in memory."""
    rows, columns, blocked = len(a.values), len(b.values), a.block == BLOCK_1X128
    a, b = _padded(a, 4 if blocked else 1), _padded(b, 16)
    if not blocked:
        # Scales [M, 1] and [1, N]; per tensor [1, 1] twice.
        scales_b = b.scales.T.contiguous()
        out = torch._scaled_mm(
            a.values, b.values.T, a.scales, scales_b,
            out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum,
        )  # fmt: skip
        return out[:, :columns]
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    out = F.scaled_mm(
        a.values, b.values.T,
        _scales_for_cublas(a), kinds[0], _scales_for_cublas(b), kinds[b.block == BLOCK_128X128],
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out[:rows, :columns]


def _padded(x: Fp8Operand, rows: int) -> Fp8Operand:
    """Pads x with zeros to a multiple of `rows` rows, and of 16 columns or a block's."""
    up, along = -len(x.values) % rows, -x.values.shape[1] % (x.block.columns or 16)
    if not up and not along:
        return x
    bits = F.pad(x.values.view(torch.uint8), (0, along, 0, up))
    scales = x.scales if x.block == PER_TENSOR else F.pad(x.scales, (0, 0, 0, up), value=1.0)
    return Fp8Operand(bits.view(x.values.dtype), scales, x.block)


def _scales_for_cublas(x: Fp8Operand) -> Tensor:
    """Scales in cuBLAS's memory order.

    Of 1 x 128 blocks column by column; of 128 x 128 row by row, with rows of a multiple of 4.
    """
    if x.block == BLOCK_1X128:
        return x.scales.T.contiguous().T
    return F.pad(x.scales, (0, -x.scales.shape[1] % 4)).T
