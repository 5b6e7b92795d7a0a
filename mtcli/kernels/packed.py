"""Many tensors in one launch: a table of their addresses, cut into chunks, one for a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl

CHUNK = 8192  # elements of a program
WIDTH = 8  # columns of the table: elements, a flag, then up to 6 addresses


class Packed(NamedTuple):
    """The table [tensors, WIDTH] int64 on host and device, and chunks [chunks, 2] int64.

    A row of `chunks` is a tensor's row in the table and the chunk's number in that tensor.
    """

    host: Tensor
    table: Tensor
    chunks: Tensor


def pack(like: Sequence[Tensor]) -> Packed:
    """The chunks of tensors of these sizes, and an empty table for `fill_`; made once."""
    sizes = [-(-x.numel() // CHUNK) for x in like]
    pairs = [torch.stack([torch.full((n,), i), torch.arange(n)], 1) for i, n in enumerate(sizes)]
    host = torch.zeros(len(like), WIDTH, dtype=torch.int64)
    device = like[0].device
    return Packed(host, host.to(device, copy=True), torch.cat(pairs).to(device))


def fill_(packed: Packed, kinds: Sequence[Sequence[Tensor]], flags: Sequence[bool]) -> bool:
    """Writes a row for each tensor: its elements, its flag, and where it is in each of `kinds`.

    `kinds` holds for each role (masters, moments, ...) a tensor of each row, contiguous. The table
    is sent to the device where an address has changed. Returns whether all addresses are multiples
    of 16 bytes.
    """
    rows = []
    for flag, *tensors in zip(flags, *kinds, strict=True):
        numel = tensors[0].numel()
        assert all(x.is_contiguous() and x.numel() == numel for x in tensors), f"{numel} elements"
        addresses = [x.data_ptr() for x in tensors]
        rows.append([numel, int(flag), *addresses, *[0] * (WIDTH - 2 - len(addresses))])
    if rows != packed.host.tolist():
        packed.host.copy_(torch.tensor(rows))
        packed.table.copy_(packed.host, non_blocking=True)
    return all(address % 16 == 0 for row in rows for address in row[2:])


@kernel()
def pointers_at(ptr, at, ALIGNED: tl.constexpr):
    """Pointers to the consecutive elements `at`; if ALIGNED, 16 bytes are read at once.

    The compiler is told so here, of the block of pointers: told of an address in the table, it
    forgets when the address is cast to a pointer.
    """
    pointers = ptr + at
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers
