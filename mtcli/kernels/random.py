"""Random numbers as a pure function of (key, index), independent of the layout.

SplitMix64 (Steele et al., OOPSLA 2014): number i of a stream is a mix of key + (i + 1) * golden
ratio, so any rank can compute any slice of it. Integer arithmetic is exact, so dropout masks are
bitwise equal everywhere. Normals are bitwise equal on one kind of device, as they are always
computed in whole blocks of one size, aligned to the global index.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels import limits
from mtcli.kernels.triton_launch import cdiv, kernel, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

# Normals per block: at most torch's grain size, so threads never split one.
BLOCK = 32768
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_SIGN = -(2**63)


@kernel()
def splitmix64(key, first, offset):
    """`random_bits` of index first + offset, for kernels: unsigned 64 bits.

    The sum is made after the product, which costs less where a row shares `first`: in dropout 31
    instructions per element instead of 37.
    """
    x = (first.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    x += offset.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@kernel()
def keeps(key, first, offset, threshold):
    """`keep_mask` of index first + offset, for kernels; the threshold is drop * 2**32."""
    return (splitmix64(key, first, offset) >> 32).to(tl.uint32) >= threshold.to(tl.uint32)


@kernel([{"PAIRS": pairs, "num_warps": warps} for pairs in (1024, 2048) for warps in (4, 8)])
def _normal(
    out_ptr,
    key: tl.int64,
    start: tl.int64,
    count: tl.int64,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Numbers `start` .. `start + count - 1`; a program computes pairs of one block."""
    first = tl.program_id(0).to(tl.int64) * PAIRS + start // (2 * HALF) * HALF
    pair = first + tl.arange(0, PAIRS)
    bits = splitmix64(key, first, tl.arange(0, PAIRS))
    uniform = ((bits >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
    angle = (bits & 0xFFFFFFFF).to(tl.float32) * 1.4629180792671596e-09  # 2 pi * 2**-32
    radius = tl.sqrt(tl.log(uniform) * -2.0)
    at = pair // HALF * (2 * HALF) + pair % HALF - start
    tl.store(out_ptr + at, radius * tl.cos(angle), mask=(at >= 0) & (at < count))
    at += HALF
    tl.store(out_ptr + at, radius * tl.sin(angle), mask=(at >= 0) & (at < count))


def stream_key(seed: int, *names: str | int) -> int:
    """A signed 64-bit key for the stream of a seed and a name, such as a parameter's."""
    text = "\0".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def random_bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits for each int64 index, as int64 in the same shape.

    At its peak three 64-bit numbers per index are alive: indices, their mix, and a temporary.
    """
    x = (index + 1).mul_(_GOLDEN).add_(key)
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


def keep_mask(key: int | Tensor, index: Tensor, drop: float | Tensor) -> Tensor:
    """A bool per index that is False with probability `drop` (to 2**-32).

    Tensors of keys (int64) and of probabilities (float64) are broadcast to the indices.
    """
    scaled = drop * 2**32
    threshold = scaled.round().long() if isinstance(scaled, Tensor) else round(scaled)
    return _shift(random_bits(key, index), 32) >= threshold


def keep_rows(key: int | Tensor, firsts: Tensor, width: int, drop: float | Tensor) -> Tensor:
    """`keep_mask` of the indices first + 0 .. width - 1 of each row: [..., width].

    A CPU computes some rows at a time, whose numbers stay in its cache: 2048 rows of 256 took 0.47
    of the time on one core, and 1 byte of memory per index where `random_bits` takes 24.
    """
    if isinstance(key, Tensor) or firsts.device.type != "cpu" or torch.compiler.is_compiling():
        return keep_mask(key, firsts[..., None] + torch.arange(width, device=firsts.device), drop)
    starts = (firsts.flatten() + 1).mul_(_GOLDEN).add_(key)[:, None]
    steps = torch.arange(width).mul_(_GOLDEN)
    keep = torch.empty(len(starts), width, dtype=torch.bool)
    rows = max(1, limits.RANDOM_BLOCK // max(1, width))
    bits, shifted = (
        torch.empty(min(rows, len(starts)), width, dtype=torch.int64) for _ in range(2)
    )
    # Both with the sign flipped, so that signed numbers compare as unsigned ones do.
    threshold = min((round(drop * 2**32) << 32) + _SIGN, -_SIGN - 1)
    for some in limits.row_slices(len(starts), rows):
        x, y = bits[: len(keep[some])], shifted[: len(keep[some])]
        torch.add(starts[some], steps, out=x)
        for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
            torch.bitwise_right_shift(x, shift, out=y)
            x.bitwise_xor_(y.bitwise_and_((1 << (64 - shift)) - 1))
            x = x.mul_(factor) if factor != 1 else x.bitwise_xor_(_SIGN)
        torch.ge(x, threshold, out=keep[some])
    return keep.view(*firsts.shape, width)


def normal_reference(
    key: int, start: int, count: int, device: torch.device | str = "cpu"
) -> Tensor:
    """`normal` in torch: computes whole blocks, and returns a part of them."""
    # A shard may be all padding.
    if count == 0:
        return torch.empty(0, device=device)
    first, last = start // BLOCK, cdiv(start + count, BLOCK)
    blocks = [_normal_block(key, block, device) for block in range(first, last)]
    return torch.cat(blocks)[start - first * BLOCK :][:count]


def normal(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard normals number start .. start + count - 1 of a stream; float32 [count].

    On a GPU 4 bytes are moved per number, also where only a part of a block is returned.
    """
    if not runs_triton(torch.empty(0, device=device)):
        return normal_reference(key, start, count, device)
    out = torch.empty(count, device=device)
    pairs = (cdiv(start + count, BLOCK) - start // BLOCK) * BLOCK // 2
    grid = lambda meta: (cdiv(pairs, meta["PAIRS"]),)  # noqa: E731
    _normal[grid](out, key, start, count, HALF=BLOCK // 2)
    return out


def _normal_block(key: int, block: int, device: torch.device | str) -> Tensor:
    """One block, by the Box-Muller transform: half of the numbers are cosines, half are sines."""
    half = BLOCK // 2
    bits = random_bits(key, torch.arange(block * half, (block + 1) * half, device=device))
    # 32 bits each; +0.5 keeps the logarithm's argument in (0, 1), so |normal| < 6.8
    high, low = _shift(bits, 32).float(), (bits & 0xFFFFFFFF).float()
    radius = high.add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = low.mul_(2.0 * math.pi * 2.0**-32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
