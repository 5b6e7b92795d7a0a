"""Multi-tensor launches: a table of addresses, divided into chunks of elements, one per program.

As apex's multi_tensor_apply. Also defines the tensors and scalars of an optimizer's update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import cdiv, kernel

if TYPE_CHECKING:
    import triton.language as tl

CHUNK = 8192  # elements of a program
# Columns of the table: elements, a flag, whether all addresses are multiples of 16 bytes, and the
# addresses of a master, its moments, the weight and the gradient.
WIDTH, ALIGNED, FIRST, GRADIENT = 8, 2, 3, 7


class OptimizerTensors(NamedTuple):
    """The tensors that an update reads and writes: float32 but for the weights, and moments in
    bfloat16 (train.moments)."""

    masters: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    weights: Sequence[Tensor]  # rounded from the masters, or the masters themselves
    decays: Sequence[bool]

    def round_(self) -> None:
        """Rounds the masters to the weights, where they are different tensors."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            if master.dtype != weight.dtype:
                weight.copy_(master)


class OptimizerStep(NamedTuple):
    """The scalars of an update; gradients are first multiplied by `factor`, which clips them.

    AdamW's kernel takes a factor of the device too, and updates nothing where it is NaN.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    count: int  # updates, with this one
    factor: float | Tensor = 1.0


class TensorTable(NamedTuple):
    """The table [tensors, WIDTH] int64 on host and device, and chunks [chunks, 2] int64.

    A row of `chunks` is (a tensor's row in the table, the chunk's number in that tensor). The table
    holds addresses, so its tensors must not be reallocated.
    """

    host: Tensor
    table: Tensor
    chunks: Tensor


def tensor_table(tensors: OptimizerTensors) -> TensorTable:
    """The table of an update's tensors, without gradients; built once."""
    like = tensors.masters
    blank = [0] * (WIDTH - 2)
    decayed = zip(like, tensors.decays, strict=True)
    host = torch.tensor([[x.numel(), decays, *blank] for x, decays in decayed])
    counts = torch.tensor([cdiv(x.numel(), CHUNK) for x in like])
    rows = torch.arange(len(like)).repeat_interleave(counts)
    numbers = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    device = like[0].device
    chunks = torch.stack([rows, numbers], 1).to(device)
    table = TensorTable(host, host.to(device, copy=True), chunks)
    for column, role in enumerate(tensors[: GRADIENT - FIRST], FIRST):
        _point_op(host, table.table, list(role), column)
    return table


def point_at_gradients_(table: TensorTable, gradients: Sequence[Tensor]) -> None:
    """Writes the gradients' addresses, and copies the table to the device if one has changed.

    Gradients in a bucket keep their addresses, so a step of 400 tensors only compares them.
    """
    assert len({x.dtype for x in gradients}) == 1, "gradients of one launch share a dtype"
    _point_op(table.host, table.table, list(gradients), GRADIENT)


@custom_op("point_(Tensor(a!) host, Tensor(b!) table, Tensor[] tensors, int column) -> ()")
def _point_op(host, table, tensors, column):
    """Writes the addresses of contiguous tensors, which must have as many elements as their rows
    say."""
    addresses = [x.data_ptr() for x in tensors]
    if addresses == host[:, column].tolist():
        return
    for x, numel in zip(tensors, host[:, 0].tolist(), strict=True):
        assert x.is_contiguous() and x.numel() == numel, f"{numel} elements"
    host[:, column] = torch.tensor(addresses)
    host[:, ALIGNED] = (host[:, FIRST:] % 16 == 0).all(1)
    table.copy_(host, non_blocking=True)


@kernel()
def chunk_of(table_ptr, chunks_ptr, CHUNK: tl.constexpr):
    """(tensor, its row of the table, first element, elements, flag) of this program's chunk, and
    whether it is full: of CHUNK elements, all of them at multiples of 16 bytes."""
    at = chunks_ptr + tl.program_id(0) * 2
    tensor = tl.load(at)
    row, start = table_ptr + tensor * 8, tl.load(at + 1) * CHUNK
    numel = tl.load(row)
    is_full = (start + CHUNK <= numel) & (tl.load(row + 2) != 0)
    return tensor, row, start, numel, tl.load(row + 1), is_full


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
