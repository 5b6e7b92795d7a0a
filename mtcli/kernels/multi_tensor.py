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
WIDTH = 8  # columns of the table: elements, a flag, whether it is aligned, up to 5 addresses


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


def fill_(table: TensorTable, roles: Sequence[Sequence[Tensor]], flags: Sequence[bool]) -> None:
    """Writes a row for each tensor: its elements, its flag, and its address in each role.

    `roles` holds for masters, moments, ... a contiguous tensor of each row; the row is aligned if
    all its addresses are multiples of 16 bytes. The table is sent to the device where an address
    has changed.
    """
    rows = []
    for flag, *tensors in zip(flags, *roles, strict=True):
        numel = tensors[0].numel()
        assert all(x.is_contiguous() and x.numel() == numel for x in tensors), f"{numel} elements"
        addresses = [x.data_ptr() for x in tensors]
        aligned = all(address % 16 == 0 for address in addresses)
        rows.append([numel, flag, aligned, *addresses, *[0] * (WIDTH - 3 - len(addresses))])
    if rows != table.host.tolist():
        table.host.copy_(torch.tensor(rows))
        table.table.copy_(table.host, non_blocking=True)


@kernel()
def chunk_of(table_ptr, chunks_ptr, CHUNK: tl.constexpr):
    """(tensor, its row of the table, first element, elements, flag) of this program's chunk, and
    whether it is whole: of CHUNK elements, all of them at multiples of 16 bytes."""
    at = chunks_ptr + tl.program_id(0) * 2
    tensor = tl.load(at)
    row, start = table_ptr + tensor * 8, tl.load(at + 1) * CHUNK
    numel = tl.load(row)
    whole = (start + CHUNK <= numel) & (tl.load(row + 2) != 0)
    return tensor, row, start, numel, tl.load(row + 1), whole


@kernel()
def load_at(ptr, at, numel, WHOLE: tl.constexpr):
    """The consecutive elements `at` of a tensor, 0 past its end; of a whole chunk by 16 bytes.

    The compiler is told of the block of pointers: told of an address in the table, it forgets when
    the address is cast to a pointer. A mask of any length would hide it too.
    """
    if WHOLE:
        return tl.load(tl.multiple_of(ptr + at, 16))
    return tl.load(ptr + at, mask=at < numel, other=0.0)


@kernel()
def store_at(ptr, at, numel, x, WHOLE: tl.constexpr):
    """Writes the elements that `load_at` reads."""
    if WHOLE:
        tl.store(tl.multiple_of(ptr + at, 16), x)
    else:
        tl.store(ptr + at, x, mask=at < numel)
