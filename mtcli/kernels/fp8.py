"""Matrix products of float8 operands that are scaled as they are at the moment ("current" scaling).

a [M, K] and b [N, K] -> a b^T [M, N] in bfloat16. An operand is cut into blocks, and each block's
largest magnitude becomes the largest number of its format: e4m3 (448; 3 bits of mantissa) or e5m2
(57344; 2 bits), arXiv:2209.05433. Sums are in float32. On a GPU the product is torch's scaled_mm;
on CPU the same numbers are multiplied in float32.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.launch import cdiv, operator

TINY = 2.0**-100  # a block's least magnitude: its scale and the inverse are normal float32 numbers
STRIP = 128  # columns of a block that is one row high, as GPUs multiply them


class Block(NamedTuple):
    """Rows and columns that share a scale; 0 is all of them."""

    rows: int
    columns: int


WHOLE, ROW, STRIPS, SQUARES = Block(0, 0), Block(1, 0), Block(1, STRIP), Block(STRIP, STRIP)


class Narrow(NamedTuple):
    """An operand in float8: values [R, K], and what a block's are multiplied by to have x again."""

    values: Tensor
    scales: Tensor  # float32 [blocks of rows, blocks of columns]
    block: Block


def narrowed_reference(x_RK: Tensor, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values, scales) of `Narrow`; the last blocks of a dimension may be cut.

    A block that holds inf or nan has the scale nan.
    """
    rows, columns = x_RK.shape
    high, wide = block.rows or rows, block.columns or columns
    wanting = (0, -columns % wide, 0, -rows % high)
    padded = F.pad(x_RK.float(), wanting) if any(wanting) else x_RK.float()
    tiles = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    largest = tiles.abs().amax((1, 3), keepdim=True).clamp(min=TINY)
    largest += largest - largest  # inf becomes nan
    top = torch.finfo(dtype).max
    up = torch.full_like(largest, top) / largest  # a number over a tensor would be rounded twice
    values = (tiles * up).to(dtype).view(padded.shape)[:rows, :columns]
    return values.contiguous(), (largest * (1.0 / top))[:, 0, :, 0]


def product_reference(a: Narrow, b: Narrow) -> Tensor:
    """a b^T [M, N], summed in float32 and rounded once to bfloat16."""
    if a.block.columns or b.block.columns:  # scales change along the sum
        return (widened(a) @ widened(b).T).bfloat16()
    sums_MN = decoded(a.values) @ decoded(b.values).T
    return sums_MN.mul_(a.scales).mul_(b.scales.T).bfloat16()


def widened(x: Narrow) -> Tensor:
    """The float32 numbers [R, K] that an operand's values and scales stand for."""
    rows, columns = x.values.shape
    high, wide = x.block.rows or rows, x.block.columns or columns
    scales = x.scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return decoded(x.values).mul_(scales)


def decoded(values: Tensor) -> Tensor:
    """`values.float()` of float8 numbers that are not nan.

    torch casts e4m3 to float32 one by one on CPU: [2048, 1024] took 8.8 ms on a core of an EPYC,
    and by way of float16, which has one more bit of exponent, 1.6 ms.
    """
    if values.dtype == torch.float8_e5m2 or values.device.type != "cpu":
        return values.float()
    bits = values.view(torch.int8).to(torch.int16)  # the sign in bits 15 to 7
    return (bits << 7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)


def narrowed(x_RK: Tensor, block: Block, dtype: torch.dtype) -> Narrow:
    """An operand in float8, e4m3 or e5m2, from one of any strides."""
    values, scales = _narrow(x_RK, *block, dtype == torch.float8_e5m2)
    return Narrow(values, scales, block)


def product(a: Narrow, b: Narrow, quick: bool = False) -> Tensor:
    """`product_reference`; on a GPU 2 * M * N * K operations of its float8 units.

    `quick` lets a Hopper GPU keep a sum in fewer bits than float32 until its end, as torchao does
    in forwards; blocks of 128 never do. Columns and rows are padded by zeros to what it takes.
    """
    return _product(a.values, a.scales, a.block, b.values, b.scales, b.block, quick)


def _run_narrow(x: Tensor, rows: int, columns: int, e5m2: bool) -> tuple[Tensor, Tensor]:
    make = _fused() if x.is_cuda else narrowed_reference
    return make(x, Block(rows, columns), _dtype(e5m2))


@cache
def _fused() -> Callable[..., tuple[Tensor, Tensor]]:
    """`narrowed_reference` as torch.compile fuses it: op by op it moves ten times the bytes."""
    return torch.compile(narrowed_reference, dynamic=True)


def _fake_narrow(x: Tensor, rows: int, columns: int, e5m2: bool) -> tuple[Tensor, Tensor]:
    r, k = x.shape
    blocks = (cdiv(r, rows or r), cdiv(k, columns or k))
    return x.new_empty(r, k, dtype=_dtype(e5m2)), x.new_empty(blocks, dtype=torch.float32)


def _dtype(e5m2: bool) -> torch.dtype:
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


def _run_product(
    a: Tensor, scales_a: Tensor, block_a: list[int],
    b: Tensor, scales_b: Tensor, block_b: list[int], quick: bool,
) -> Tensor:  # fmt: skip
    operands = Narrow(a, scales_a, Block(*block_a)), Narrow(b, scales_b, Block(*block_b))
    return _by_scaled_mm(*operands, quick) if a.is_cuda else product_reference(*operands)


def _by_scaled_mm(a: Narrow, b: Narrow, quick: bool) -> Tensor:
    """torch's product, which takes b^T with whole columns in memory."""
    rows, columns, blocked = len(a.values), len(b.values), a.block == STRIPS
    a, b = _padded(a, 4 if blocked else 1), _padded(b, 16)
    if not blocked:  # [M, 1] and [1, N]; of one number for all [1, 1] twice
        wide = b.scales.T.contiguous()
        out = torch._scaled_mm(
            a.values, b.values.T, a.scales, wide, out_dtype=torch.bfloat16, use_fast_accum=quick
        )
        return out[:, :columns]
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    out = F.scaled_mm(
        a.values, b.values.T,
        _laid_out(a), kinds[0], _laid_out(b), kinds[b.block == SQUARES],
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out[:rows, :columns]


def _padded(x: Narrow, rows: int) -> Narrow:
    """With zeros up to a multiple of so many rows, and of what columns come in."""
    up, along = -len(x.values) % rows, -x.values.shape[1] % (x.block.columns or 16)
    if not up and not along:
        return x
    bits = F.pad(x.values.view(torch.uint8), (0, along, 0, up))
    scales = x.scales if x.block == WHOLE else F.pad(x.scales, (0, 0, 0, up), value=1.0)
    return Narrow(bits.view(x.values.dtype), scales, x.block)


def _laid_out(x: Narrow) -> Tensor:
    """Scales as cuBLAS reads them: those of a column of blocks follow each other; of squares, those
    of a row do, and their number is a multiple of 4."""
    if x.block == STRIPS:
        return x.scales.T.contiguous().T
    return F.pad(x.scales, (0, -x.scales.shape[1] % 4)).T


_narrow = operator(
    "fp8_narrow(Tensor x, int rows, int columns, bool e5m2) -> (Tensor, Tensor)",
    _run_narrow,
    _fake_narrow,
)
_product = operator(
    "fp8_product(Tensor a, Tensor scales_a, int[] block_a, "
    "Tensor b, Tensor scales_b, int[] block_b, bool quick) -> Tensor",
    _run_product,
    lambda a, scales_a, block_a, b, scales_b, block_b, quick: a.new_empty(
        len(a), len(b), dtype=torch.bfloat16
    ),
)
