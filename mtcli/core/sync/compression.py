"""Compresses flat tensors to bytes: quantises values to b bits, and may keep the largest alone.

A value of b bits is a sign and the nearest of 2^(b-1) magnitudes, times the scale of its row. The
magnitudes of 8 bits are evenly spaced; those of 4 bits are powers of two (E3M0, Streaming DiLoCo,
arXiv:2501.18512, section 3.3). Both are scaled by the row's largest magnitude. Those of 2 bits are
two means: of the magnitudes below the row's mean magnitude, and of those above.

Shapes: R rows, C columns, K values of a row that are sent. Equal values compress to equal bytes on
all ranks, so copies of a tensor stay equal.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.core.exchange.payload import Payload

# Of a value's largest magnitude.
MAGNITUDES = {
    8: tuple(i / 127 for i in range(128)),
    4: (0.0, *(2.0**-i for i in range(6, -1, -1))),
}


def compress(x: Tensor, form: Payload) -> Tensor:
    """The bytes of a flat tensor: scales, values, then the bitmaps and low bits of indices."""
    length = len(x)
    x_RC = F.pad(x, (0, form.rows * form.columns - length)).view(form.rows, form.columns)
    indices: list[Tensor] = []
    x_RK = x_RC
    if form.sent < form.columns:
        at_RK = x_RC.abs().topk(form.sent, dim=1, sorted=False).indices.sort(dim=1).values
        x_RK, indices = x_RC.gather(1, at_RK), pack_indices(at_RK, form)
    count = form.num_values(length)
    if not form.bits:
        return torch.cat([_bytes(x_RK.float().flatten()[:count]), *indices])
    codes_RK, scales = quantise(x_RK.float(), form.bits)
    values = pack(codes_RK.flatten()[:count], form.bits)
    return torch.cat([_bytes(scales.flatten()), values, *indices])


def decompress(payload: Tensor, form: Payload, length: int) -> Tensor:
    """The flat float32 tensor of a payload; zeros where no value was sent."""
    scales, values, bitmaps, low = payload.split(list(form.sizes(length)))
    if form.bits:
        per_row = _floats(scales).view(form.rows, form.scales)
        x_RK = dequantise(values, per_row, form)
    else:
        x_RK = _floats(values).view(form.rows, form.sent)
    if form.sent < form.columns:
        at_RK = unpack_indices(bitmaps, low, form)
        x_RK = x_RK.new_zeros(form.rows, form.columns).scatter_(1, at_RK, x_RK)
    return x_RK.flatten()[:length]


def quantise(x_RK: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(uint8 codes [R, K] of `bits` bits, float32 scales [R, 1], or [R, 2] for 2 bits)."""
    size_RK = x_RK.abs()
    if bits == 2:
        index_RK = (size_RK > size_RK.mean(1, keepdim=True)).view(torch.uint8)
        above = index_RK.sum(1)
        large = (size_RK * index_RK).sum(1)
        small = (size_RK.sum(1) - large).clamp(min=0.0)
        scales = torch.stack([small / (size_RK.shape[1] - above), large / above.clamp(min=1)], 1)
    else:
        scales = size_RK.amax(1, keepdim=True)
        smallest = torch.finfo(torch.float32).tiny
        index_RK = nearest_index(size_RK / scales.clamp(min=smallest), bits)
    return index_RK | ((x_RK < 0).view(torch.uint8) << (bits - 1)), scales


def nearest_index(share: Tensor, bits: int) -> Tensor:
    """The uint8 index of the nearest of MAGNITUDES to each float32 share; the lower of equal ones.

    Equals torch.bucketize in half of its time on a CPU. NaN gets the last index.
    """
    share = share.nan_to_num(nan=1.0)
    if bits == 4:  # powers of two: the exponent, one more where the mantissa is above a half
        exponent = (share.view(torch.int32) + 0x3FFFFF >> 23) - 120
        return torch.maximum(exponent, (share > 2.0**-7).int()).to(torch.uint8)
    levels = torch.tensor(MAGNITUDES[bits], device=share.device)
    ends = F.pad((levels[1:] + levels[:-1]) / 2, (1, 1), value=torch.inf)
    ends[0] = -torch.inf
    index = (share.flatten() * (len(levels) - 1)).round().int()  # but for rounding
    index += share.flatten() > ends[1:].index_select(0, index)
    index -= (share.flatten() <= ends.index_select(0, index)).int()
    return index.view_as(share).to(torch.uint8)


def dequantise(packed: Tensor, scales: Tensor, form: Payload) -> Tensor:
    """The float32 values [R, K] of packed codes; padding has arbitrary values."""
    size = form.rows * form.sent
    octets = F.pad(packed, (0, -(-size * form.bits // 8) - len(packed)))
    if form.bits == 2:
        codes_RK = unpack(octets, 2, size).view(form.rows, form.sent)
        return (1.0 - 2.0 * (codes_RK >> 1)) * scales.gather(1, codes_RK & 1)
    table = _values_of_bytes(form.bits, packed.device)
    values = table.index_select(0, octets.int()).view(-1)[:size]
    return values.view(form.rows, form.sent) * scales


@cache
def _values_of_bytes(bits: int, device: torch.device) -> Tensor:
    """The values of the codes in each byte, of a row whose scale is 1: [256, 8 / bits]."""
    levels = torch.tensor(MAGNITUDES[bits], device=device)
    bytes_ = torch.arange(256, dtype=torch.uint8, device=device)
    codes = unpack(bytes_, bits, 256 * 8 // bits)
    return torch.cat([levels, -levels]).index_select(0, codes).view(256, 8 // bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes packed without gaps, lowest bits first: uint8 [ceil(n * bits / 8)]."""
    if 8 % bits:
        codes, bits = ((codes[:, None] >> torch.arange(bits, device=codes.device)) & 1).flatten(), 1
    octets = F.pad(codes.to(torch.uint8), (0, -len(codes) % (8 // bits))).view(-1, 8 // bits)
    packed = octets[:, 0].clone()
    for i in range(1, 8 // bits):
        packed |= octets[:, i] << (i * bits)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The int64 codes of `pack`."""
    unit = bits if 8 % bits == 0 else 1
    starts = torch.arange(0, 8, unit, dtype=torch.uint8, device=packed.device)  # in an octet
    codes = (packed[:, None] >> starts) & ((1 << unit) - 1)
    flat = codes.flatten()[: count * bits // unit].long()
    if unit == bits:
        return flat
    return (flat.view(count, bits) << torch.arange(bits, device=packed.device)).sum(1)


def pack_indices(at_RK: Tensor, form: Payload) -> list[Tensor]:
    """The bitmaps and the low bits of indices that ascend in each row."""
    order = torch.arange(form.sent, device=at_RK.device)
    bitmap = at_RK.new_zeros(form.rows, form.bitmap).scatter_(
        1, (at_RK >> form.low_bits) + order, 1
    )
    low = (at_RK & ((1 << form.low_bits) - 1)).flatten()
    packed = pack(low, form.low_bits) if form.low_bits else low.new_empty(0, dtype=torch.uint8)
    return [pack(bitmap.flatten(), 1), packed]


def unpack_indices(bitmaps: Tensor, low: Tensor, form: Payload) -> Tensor:
    """The indices [R, K] of `pack_indices`."""
    rows, sent = form.rows, form.sent
    bitmap = unpack(bitmaps, 1, rows * form.bitmap).view(rows, form.bitmap)
    high = bitmap.nonzero()[:, 1].view(rows, sent) - torch.arange(sent, device=low.device)
    if not form.low_bits:
        return high
    return (high << form.low_bits) | unpack(low, form.low_bits, rows * sent).view(rows, sent)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _floats(payload: Tensor) -> Tensor:
    """Float32 values of bytes at any offset of a payload; a view would need alignment."""
    return payload.clone().view(torch.float32)
