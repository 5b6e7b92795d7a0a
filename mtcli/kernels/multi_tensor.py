"""Multi-tensor launches: a table of addresses, cut into chunks of elements, one per program.

As apex's multi_tensor_apply; what an optimizer's kernels read and write is stated here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.launch import cdiv, kernel

if TYPE_CHECKING:
    import triton.language as tl

CHUNK = 8192  # elements of a program
WIDTH = 8  # columns of the table: elements, a flag, then up to 6 addresses


class OptimizerTensors(NamedTuple):
    """What an update reads and writes, tensor by tensor: float32 but for the weights."""

    masters: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    weights: Sequence[Tensor]  # rounded from the masters, or the masters themselves
    decays: Sequence[bool]


class OptimizerStep(NamedTuple):
    """The scalars of an update; gradients are multiplied by `factor` first, as for clipping."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    count: int  # updates, with this one
    factor: float = 1.0


class TensorTable(NamedTuple):
    """The table [tensors, WIDTH] int64 on host and device, and chunks [chunks, 2] int64.

    A row of `chunks` is a tensor's row in the table and the chunk's number in that tensor.
    """

    host: Tensor
    table: Tensor
    chunks: Tensor


def tensor_table(like: Sequence[Tensor]) -> TensorTable:
    """The chunks of tensors of these sizes, and an empty table for `fill_`; made once."""
    sizes = [cdiv(x.numel(), CHUNK) for x in like]
    pairs = [torch.stack([torch.full((n,), i), torch.arange(n)], 1) for i, n in enumerate(sizes)]
    host = torch.zeros(len(like), WIDTH, dtype=torch.int64)
    device = like[0].device
    return TensorTable(host, host.to(device, copy=True), torch.cat(pairs).to(device))


def fill_(table: TensorTable, roles: Sequence[Sequence[Tensor]], flags: Sequence[bool]) -> bool:
    """Writes a row for each tensor: its elements, its flag, and its address in each role.

    `roles` holds for masters, moments, ... a contiguous tensor of each row. The table is sent to
    the device where an address has changed. Returns whether all addresses are multiples of 16
    bytes.
    """
    rows = []
    for flag, *tensors in zip(flags, *roles, strict=True):
        numel = tensors[0].numel()
        assert all(x.is_contiguous() and x.numel() == numel for x in tensors), f"{numel} elements"
        addresses = [x.data_ptr() for x in tensors]
        rows.append([numel, int(flag), *addresses, *[0] * (WIDTH - 2 - len(addresses))])
    if rows != table.host.tolist():
        table.host.copy_(torch.tensor(rows))
        table.table.copy_(table.host, non_blocking=True)
    return all(address % 16 == 0 for row in rows for address in row[2:])


@kernel()
def chunk_of(table_ptr, chunks_ptr, CHUNK: tl.constexpr):
    """(tensor, its row of the table, first element, elements, flag) of this program's chunk."""
    at = chunks_ptr + tl.program_id(0) * 2
    tensor = tl.load(at)
    row = table_ptr + tensor * 8
    return tensor, row, tl.load(at + 1) * CHUNK, tl.load(row), tl.load(row + 1)


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
