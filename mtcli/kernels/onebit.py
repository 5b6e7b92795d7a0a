"""1-bit compression with error feedback: signs packed as bits, and one scale (arXiv:2104.06069).

y = x + error is compressed to q = scale * sign(y), with sign(0) = +1 and scale = |y| / sqrt(size);
the error of the next time is y - q. 8 signs are a byte, the first of them its lowest bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.launch import cdiv, kernel, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096  # elements of a program


def compress_reference_(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Compresses x + error to (bits [ceil(size / 8)] uint8, scale float32 scalar).

    Overwrites the error by what they leave of the sum. x and error are float32 [size]; bits past
    their end are 0.
    """
    error += x
    scale = error.norm() / error.numel() ** 0.5
    positive = error >= 0
    padded = torch.nn.functional.pad(positive, (0, -len(error) % 8)).view(-1, 8)
    bits = (padded * 2 ** torch.arange(8, device=x.device)).sum(1, dtype=torch.uint8)
    error -= torch.where(positive, scale, -scale)
    return bits, scale


def decompress_reference(bits: Tensor, scale: Tensor, size: int) -> Tensor:
    """Unpacks scale * sign: float32 [size]."""
    signs = bits[:, None] >> torch.arange(8, device=bits.device, dtype=torch.uint8) & 1
    return torch.where(signs.flatten()[:size] > 0, scale, -scale)


@kernel()
def _add(x_ptr, error_ptr, squares_ptr, size, BLOCK: tl.constexpr):
    """Adds x to the error, and sums the squares of each block."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(error_ptr + at, mask=at < size, other=0.0)
    y += tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(error_ptr + at, y, mask=at < size)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(y * y, 0))


@kernel()
def _pack(error_ptr, scale_ptr, bits_ptr, size, BYTES: tl.constexpr):
    """Packs the signs of the error, and subtracts scale * sign from it."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)
    at = byte[:, None] * 8 + bit[None, :]
    y = tl.load(error_ptr + at, mask=at < size, other=-1.0)
    scale = tl.load(scale_ptr)
    tl.store(error_ptr + at, y - tl.where(y >= 0.0, scale, -scale), mask=at < size)
    bits = tl.sum((y >= 0.0).to(tl.int32) << bit[None, :], 1)
    tl.store(bits_ptr + byte, bits.to(tl.uint8), mask=byte * 8 < size)


@kernel()
def _unpack(bits_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Unpacks; a byte is read by each of its 8 elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at // 8, mask=at < size, other=0).to(tl.int32)
    scale = tl.load(scale_ptr)
    out = tl.where(((bits >> (at % 8).to(tl.int32)) & 1) != 0, scale, -scale)
    tl.store(out_ptr + at, out, mask=at < size)


def compress_(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """`compress_reference_`, on a GPU in two passes: 20 bytes moved per element, and its bit."""
    if not runs_triton(x):
        return compress_reference_(x, error)
    return _compress(x, error)


def decompress(bits: Tensor, scale: Tensor, size: int) -> Tensor:
    """`decompress_reference`: 4 bytes moved per element, and its bit."""
    if not runs_triton(scale):
        return decompress_reference(bits, scale, size)
    return _decompress(bits, scale, size)


@custom_op(
    "compress_(Tensor x, Tensor(a!) error) -> (Tensor, Tensor)",
    fake=lambda x, error: (x.new_empty(cdiv(len(x), 8), dtype=torch.uint8), x.new_empty(())),
)
def _compress(x, error):
    assert x.is_contiguous() and error.is_contiguous() and x.dtype == error.dtype == torch.float32
    size, blocks = len(x), cdiv(len(x), BLOCK)
    squares, bits = x.new_empty(blocks), x.new_empty(cdiv(size, 8), dtype=torch.uint8)
    _add[(blocks,)](x, error, squares, size, BLOCK=BLOCK)
    scale = (squares.sum() / size).sqrt()
    _pack[(blocks,)](error, scale, bits, size, BYTES=BLOCK // 8)
    return bits, scale


@custom_op(
    "decompress(Tensor bits, Tensor scale, int size) -> Tensor",
    fake=lambda bits, scale, size: scale.new_empty(size),
)
def _decompress(bits, scale, size):
    out = scale.new_empty(size)
    _unpack[(cdiv(size, BLOCK),)](bits.contiguous(), scale, out, size, BLOCK=BLOCK)
    return out
