"""Float8 quantization with scales computed from the operand itself ("current" scaling), and its
GEMM.

a [M, K] and b [N, K] -> a b^T [M, N] in bfloat16. The scale of a block maps its largest magnitude
to the format's largest number: e4m3 (448; 3 bits of mantissa) or e5m2 (57344; 2 bits),
arXiv:2209.05433. Sums are in float32. On a GPU the GEMM is torch's scaled_mm; on CPU the same
numbers are multiplied in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import cdiv, kernel, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

# The least magnitude of a block, so that its scale and the inverse are normal float32.
LEAST = 2.0**-100
LEAST_BITS = (127 - 100) << 23  # of it as float32
SPAN = 16  # tiles along a row that a program finds the largest magnitude of


class ScaleBlock(NamedTuple):
    """The rows and columns of a block with one scale; 0 is all of them."""

    rows: int
    columns: int


PER_TENSOR, PER_ROW = ScaleBlock(0, 0), ScaleBlock(1, 0)
BLOCK_1X128, BLOCK_128X128 = ScaleBlock(1, 128), ScaleBlock(128, 128)


class Fp8Operand(NamedTuple):
    """An operand [R, K] in float8, with a scale per block."""

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
    """Casts float8 numbers that are not nan to float32, as `values.float()` does.

    torch casts e4m3 to float32 one number at a time on CPU: [2048, 1024] took 8.8 ms on a core of
    an EPYC; through float16, which has one more bit of exponent, 1.6 ms.
    """
    if values.dtype == torch.float8_e5m2 or values.device.type != "cpu":
        return values.float()
    # Widened, the sign is in bits 15 to 7.
    bits = values.view(torch.int8).to(torch.int16)
    return (bits << 7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)


@kernel()
def _magnitudes(x_ptr, row, column, rows, columns, of_row, of_column):
    """x [rows, columns] in float32, and its magnitudes' bits: in their order, nan above inf."""
    inside = (row < rows) & (column < columns)
    at = x_ptr + row.to(tl.int64) * of_row + column.to(tl.int64) * of_column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return x, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel()
def _largest(
    x_ptr, largest_ptr, rows, columns, of_row, of_column,
    PER_ROW: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """largest [rows] or [1]: the bits of the largest magnitudes, from zeros."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * SPAN * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    for i in range(SPAN):
        at = column + i * COLUMNS
        _, bits = _magnitudes(x_ptr, row, at, rows, columns, of_row, of_column)
        most = tl.maximum(most, bits)
    of_rows = tl.max(most, 1, keep_dims=True)
    if PER_ROW:
        tl.atomic_max(largest_ptr + row, of_rows, mask=row < rows)
    else:
        tl.atomic_max(largest_ptr, tl.max(tl.max(of_rows, 1), 0))


@kernel()
def _scale(
    x_ptr, largest_ptr, values_ptr, scales_ptr, rows, columns, of_row, of_column, blocks,
    TOP: tl.constexpr, LEAST_BITS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`quantize_reference` of a tile: COLUMNS of a block, of HIGH x WIDE, where WIDE is not 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    across = tl.program_id(1)
    column = across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x, bits = _magnitudes(x_ptr, row, column, rows, columns, of_row, of_column)
    if WIDE > 0:
        bits = tl.max(bits, 1, keep_dims=True)
        if HIGH > 1:
            bits = tl.max(bits, 0, keep_dims=True)
    elif HIGH == 1:
        bits = tl.load(largest_ptr + row, mask=row < rows, other=0)
    else:
        bits = tl.load(largest_ptr + tl.zeros((1, 1), tl.int32))
    largest = tl.maximum(bits, LEAST_BITS).to(tl.float32, bitcast=True)
    largest += largest - largest  # inf becomes nan
    values = x * tl.div_rn(tl.zeros_like(largest) + TOP, largest)
    at = values_ptr + row.to(tl.int64) * columns + column
    tl.store(at, values.to(values_ptr.dtype.element_ty), mask=(row < rows) & (column < columns))
    # A tile of each block writes its scale.
    block = row if HIGH == 1 else tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    inside = row < rows if HIGH == 1 else block >= 0
    if HIGH == 0:
        inside = inside & (block == 0)
    if WIDE == 0:
        inside = inside & (across == 0)
    at = scales_ptr + block.to(tl.int64) * blocks + across
    tl.store(at, largest * (1.0 / TOP), mask=inside)


def quantize(x_RK: Tensor, block: ScaleBlock, dtype: torch.dtype) -> Fp8Operand:
    """Quantizes x [R, K], of any strides, to float8: `dtype` is torch's e4m3fn or e5m2."""
    values, scales = _quantize(x_RK, *block, dtype == torch.float8_e5m2)
    return Fp8Operand(values, scales, block)


def fp8_gemm(a: Fp8Operand, b: Fp8Operand, use_fast_accum: bool = False) -> Tensor:
    """`fp8_gemm_reference`; on a GPU 2 * M * N * K operations of its float8 units.

    `use_fast_accum` lets a Hopper GPU accumulate in fewer bits than float32, as torchao does in
    forwards; blocks of 128 never do. Operands are padded with zeros to the multiples of rows and
    columns that torch needs, and the result is sliced to [M, N].
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
    block, dtype = ScaleBlock(rows, columns), _dtype(e5m2)
    if not runs_triton(x) or not x.numel():
        return quantize_reference(x, block, dtype)
    values, scales = _fake_quantize(x, *block, e5m2)
    # Tiles that are long where x is contiguous, and are a block high and wide where those are.
    high, wide = (16, 128) if x.stride(1) == 1 else (128, 16)
    sizes = (*x.shape, *x.stride())
    if columns:
        largest = scales
    else:
        largest = torch.zeros(len(scales), dtype=torch.int32, device=x.device)
        grid = (cdiv(x.shape[0], high), cdiv(x.shape[1], SPAN * wide))
        _largest[grid](x, largest, *sizes, PER_ROW=rows == 1, SPAN=SPAN, ROWS=high, COLUMNS=wide)
    high = 128 if rows == 128 else 64 if x.stride(1) != 1 else 32
    grid = (cdiv(x.shape[0], high), cdiv(x.shape[1], 128))
    flags = {"TOP": torch.finfo(dtype).max, "LEAST_BITS": LEAST_BITS}
    flags |= {"HIGH": rows, "WIDE": columns, "ROWS": high, "COLUMNS": 128}
    _scale[grid](x, largest, values, scales, *sizes, scales.shape[1], **flags)
    return values, scales


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
    """torch's scaled GEMMs, which take b^T in column-major order."""
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
    """The scales in cuBLAS's memory order.

    Those of 1 x 128 blocks are column-major; those of 128 x 128 row-major, with row lengths padded
    to a multiple of 4.
    """
    if x.block == BLOCK_1X128:
        return x.scales.T.contiguous().T
    return F.pad(x.scales, (0, -x.scales.shape[1] % 4)).T
