"""1-bit compression with error feedback: signs packed as bits, and one scale (arXiv:2104.06069).

y = x + error is compressed to q = scale * sign(y), with sign(0) = +1, and y - q is the next error.
The scale is |y| / sqrt(size) over all that is compressed together, which may be on several ranks:
so adding and packing are two passes. 8 signs are a byte, lowest bit first.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import cdiv, kernel, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 4096  # elements of a program
# Of 8 bytes that are 0 or 1, as one integer: times GATHER, the highest byte has the bits of all.
GATHER = 0x0102040810204080


def add_reference_(x: Tensor, error: Tensor) -> Tensor:
    """Adds x [size] to the error [size] in place; returns the sum of squares of the result."""
    error += x
    return square_sum(error)


def square_sum(x: Tensor) -> Tensor:
    """The sum of squares of x [size]: a scalar. Not a dot product, which on CPUs with oneDNN GEMMs
    takes 12 times as long."""
    return torch.linalg.vector_norm(x).square()


def pack_reference_(y: Tensor, scale: Tensor) -> Tensor:
    """Packs the signs of y [size] as bits [ceil(size / 8)] uint8, and subtracts scale * sign.

    Bits past the end are 0.
    """
    positive = y >= 0
    padded = torch.nn.functional.pad(positive, (0, -len(y) % 8)) if len(y) % 8 else positive
    bits = (padded.view(torch.int64) * GATHER >> 56).to(torch.uint8)
    y -= unpack_reference(bits, scale, len(y))
    return bits


def unpack_reference(bits: Tensor, scale: Tensor, size: int) -> Tensor:
    """Unpacks scale * sign: [size], of the scale's dtype."""
    signs = _signs_of_bytes(scale.dtype, scale.device) * scale  # [256, 8]
    return signs.index_select(0, bits.int()).view(-1)[:size]


@cache
def _signs_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The signs of each byte's bits: [256, 8], 1 or -1."""
    byte, bit = torch.arange(256, device=device)[:, None], torch.arange(8, device=device)
    return (2 * (byte >> bit & 1) - 1).to(dtype)


@kernel()
def _add(x_ptr, error_ptr, squares_ptr, size, BLOCK: tl.constexpr):
    """Adds x to the error, and sums the squares of each block."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(error_ptr + at, mask=at < size, other=0.0)
    y += tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(error_ptr + at, y, mask=at < size)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(y * y, 0))


@kernel()
def _pack(y_ptr, scale_ptr, bits_ptr, size, BYTES: tl.constexpr):
    """Packs the signs of y, and subtracts scale * sign from it."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)
    at = byte[:, None] * 8 + bit[None, :]
    y = tl.load(y_ptr + at, mask=at < size, other=-1.0)
    scale = tl.load(scale_ptr)
    tl.store(y_ptr + at, y - tl.where(y >= 0.0, scale, -scale), mask=at < size)
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


def add_(x: Tensor, error: Tensor) -> Tensor:
    """`add_reference_`: 12 bytes moved per element."""
    if not (runs_triton(x) and len(x)):
        return add_reference_(x, error)
    return _add_op(x, error)


def pack_(y: Tensor, scale: Tensor) -> Tensor:
    """`pack_reference_`: 8 bytes moved per element, and its bit."""
    if not (runs_triton(y) and len(y)):
        return pack_reference_(y, scale)
    return _pack_op(y, scale)


def unpack(bits: Tensor, scale: Tensor, size: int) -> Tensor:
    """`unpack_reference`: 4 bytes moved per element, and its bit."""
    if not (runs_triton(scale) and size):
        return unpack_reference(bits, scale, size)
    return _unpack_op(bits, scale, size)


@custom_op("onebit_add_(Tensor x, Tensor(a!) error) -> Tensor", fake=lambda x, _: x.new_empty(()))
def _add_op(x, error):
    assert x.is_contiguous() and error.is_contiguous() and x.dtype == error.dtype == torch.float32
    blocks = cdiv(len(x), BLOCK)
    squares = x.new_empty(blocks)
    _add[(blocks,)](x, error, squares, len(x), BLOCK=BLOCK)
    return squares.sum()


@custom_op(
    "onebit_pack_(Tensor(a!) y, Tensor scale) -> Tensor",
    fake=lambda y, _: y.new_empty(cdiv(len(y), 8), dtype=torch.uint8),
)
def _pack_op(y, scale):
    assert y.is_contiguous() and y.dtype == scale.dtype == torch.float32
    bits = y.new_empty(cdiv(len(y), 8), dtype=torch.uint8)
    _pack[(cdiv(len(y), BLOCK),)](y, scale, bits, len(y), BYTES=BLOCK // 8)
    return bits


@custom_op(
    "onebit_unpack(Tensor bits, Tensor scale, int size) -> Tensor",
    fake=lambda bits, scale, size: scale.new_empty(size),
)
def _unpack_op(bits, scale, size):
    out = scale.new_empty(size)
    _unpack[(cdiv(size, BLOCK),)](bits.contiguous(), scale, out, size, BLOCK=BLOCK)
    return out
