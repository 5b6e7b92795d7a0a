"""A linear layer of many experts at once ("grouped GEMM"): each has a weight and a run of rows.

N rows of D sorted by expert, E experts of width F; `ends` [E] int32 are the ends of their runs.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtcli.kernels.launch import beats_torch, cdiv, kernel, operator, power_of_two, runs_triton
from mtcli.kernels.products import LinearBy, Products, float32_precision, linear

if TYPE_CHECKING:
    import triton.language as tl

SIZES = ("ROWS", "COLUMNS", "INNER", "num_warps", "num_stages")
TILES = tuple(
    dict(zip(SIZES, sizes, strict=True))
    for sizes in (
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (64, 256, 64, 8, 3),
        (64, 128, 64, 4, 4),
        (64, 64, 32, 4, 3),
    )
)
BAND = 8  # tiles of rows that share a tile of weights in the L2 cache
FEW = 1024  # rows of an expert below which a tile has 64


def default_tile(rows_each: int, width: int, inner: int, itemsize: int) -> dict[str, int]:
    """What is launched where nothing was measured: the last fits float32 in shared memory."""
    if itemsize == 4:
        return TILES[-1]
    return TILES[0] if rows_each >= FEW else TILES[3]


def grouped_linear_reference(x_ND: Tensor, weight_EFD: Tensor, counts: list[int]) -> Tensor:
    """x W_e^T for each expert's rows, one expert after another: [N, D] -> [N, F]."""
    runs = zip(x_ND.split(counts), weight_EFD.unbind(0), strict=True)
    return torch.cat([linear(x, weight) for x, weight in runs])


@kernel()
def locate(ends_ptr, tile, experts, E: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, end of its run) of a tile of rows; past the last tile no rows."""
    lane = tl.arange(0, E)
    end = tl.load(ends_ptr + lane, mask=lane < experts, other=0)
    start = tl.load(ends_ptr + lane - 1, mask=(lane > 0) & (lane < experts), other=0)
    tiles = tl.where(lane < experts, (end - start + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    mine = lane == expert
    first = tl.sum(tl.where(mine, start + (tile - last + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@kernel(TILES, key=["rows_each", "width", "inner", "itemsize"], default=default_tile)
def _product(
    x_ptr, weight_ptr, ends_ptr, out_ptr, experts, rows_each, width, inner, itemsize,
    of_expert: tl.int64, of_column, of_inner,
    E: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BAND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip  # strides of the weight, whose rows are columns of the result; EVEN: no last part
    column_tiles = tl.cdiv(width, COLUMNS)
    in_band = BAND * column_tiles
    band, place = tl.program_id(0) // in_band, tl.program_id(0) % in_band
    expert, first, end = locate(ends_ptr, band * BAND + place % BAND, experts, E, ROWS)
    if first < end:
        row = first + tl.arange(0, ROWS)
        column = place // BAND * COLUMNS + tl.arange(0, COLUMNS)
        # Rows past the end are read again. Columns are masked: a minimum of them would hide that
        # they follow each other in memory where the weight is transposed, as for the gradient of x.
        at_row, k = tl.minimum(row, end - 1).to(tl.int64)[:, None], tl.arange(0, INNER)
        x_at = x_ptr + at_row * inner + k[None, :]
        at_column = column.to(tl.int64)[None, :] * of_column
        weight_at = weight_ptr + expert * of_expert + at_column + k[:, None] * of_inner
        inside = (column < width)[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for done in range(0, inner, INNER):
            if EVEN:
                x, weight = tl.load(x_at), tl.load(weight_at, mask=inside, other=0.0)
            else:
                left = inner - done
                x = tl.load(x_at, mask=k[None, :] < left, other=0.0)
                weight = tl.load(weight_at, mask=inside & (k[:, None] < left), other=0.0)
            total = tl.dot(x, weight, total, input_precision=PRECISION)
            x_at += INNER
            weight_at += INNER * of_inner
        at = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(at, total, mask=(row < end)[:, None] & inside)


@kernel(TILES, key=["rows_each", "width", "inner", "itemsize"], default=default_tile)
def _outer(
    grad_ptr, x_ptr, ends_ptr, out_ptr, rows_each, width, inner, itemsize,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip  # out [E, width, inner]: grad^T x over an expert's rows, INNER at a time
    expert = tl.program_id(1)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    across = tl.cdiv(inner, COLUMNS)
    f = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    f_inside, d_inside = (f < width)[:, None], (d < inner)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, end, INNER):
        row = first + tl.arange(0, INNER)
        at, there = row.to(tl.int64), row < end
        grad_at = grad_ptr + at[None, :] * width + f[:, None]
        grad = tl.load(grad_at, mask=there[None, :] & f_inside, other=0.0)
        x_at = x_ptr + at[:, None] * inner + d[None, :]
        x = tl.load(x_at, mask=there[:, None] & d_inside, other=0.0)
        total = tl.dot(grad, x, total, input_precision=PRECISION)
    at = out_ptr + (expert.to(tl.int64) * width + f[:, None]) * inner + d[None, :]
    tl.store(at, total, mask=f_inside & d_inside)


def grouped_linear(x_ND: Tensor, weight_EFD: Tensor, counts: list[int]) -> Tensor:
    """`grouped_linear_reference`, on a GPU in one launch for all experts, forward and backward.

    6 * N * D * F operations with both gradients.
    """
    if not runs_triton(x_ND):
        return grouped_linear_reference(x_ND, weight_EFD, counts)
    return LinearBy.apply(x_ND, weight_EFD, None, grouped_products(x_ND, weight_EFD, counts))


def grouped_products(x_ND: Tensor, weight_EFD: Tensor, counts: list[int]) -> Products:
    """The three products of all experts on a GPU, for such rows, weights and numbers of rows.

    Runs of one length are a batched product of cuBLAS; torch's grouped product is called where it
    was measured to be faster than ours.
    """
    if len(set(counts)) == 1:
        return _batched(len(counts))
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    ends = ends.to(x_ND.device, non_blocking=True)  # without waiting for the GPU
    if beats_torch("grouped_linear", x_ND, weight_EFD.shape[1]) or not _torch_can(x_ND, weight_EFD):
        return _ours(ends)
    return _by_torch(ends)


def _batched(experts: int) -> Products:
    def runs(x: Tensor) -> Tensor:
        return x.unflatten(0, (experts, -1))

    return Products(
        lambda x, weight, bias: torch.bmm(runs(x), weight.transpose(1, 2)).flatten(0, 1),
        lambda grad, weight: torch.bmm(runs(grad), weight).flatten(0, 1),
        lambda grad, x: torch.bmm(runs(grad).transpose(1, 2), runs(x)),
    )


def _ours(ends: Tensor) -> Products:
    return Products(
        lambda x, weight, bias: _linear(x, weight, ends),
        lambda grad, weight: _linear(grad, weight.transpose(1, 2), ends),
        lambda grad, x: _outer_op(grad, x, ends),
    )


def _by_torch(ends: Tensor) -> Products:
    multiply = torch._grouped_mm
    return Products(
        lambda x, weight, bias: multiply(x, weight.transpose(1, 2), offs=ends),
        lambda grad, weight: multiply(grad, weight, offs=ends),
        lambda grad, x: multiply(grad.transpose(0, 1), x, offs=ends),
    )


def grouped_linear_by_torch(x_ND: Tensor, weight_EFD: Tensor, counts: list[int]) -> Tensor:
    """`grouped_linear_reference` by torch's grouped product, for benchmarks."""
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x_ND.device)
    return torch._grouped_mm(x_ND, weight_EFD.transpose(1, 2), offs=ends)


def _torch_can(x: Tensor, weight: Tensor) -> bool:
    """torch's takes bfloat16 in rows of a multiple of 16 bytes."""
    return x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 == weight.shape[1] % 8


def _run(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    x, (experts, width, inner) = x.contiguous(), weight.shape
    rows, out = len(x), x.new_empty(len(x), width)

    def grid(meta: Any) -> tuple[int]:
        bands = cdiv(cdiv(rows, meta["ROWS"]) + experts, BAND)  # each expert's last tile may be cut
        return (bands * BAND * cdiv(width, meta["COLUMNS"]),)

    sizes = (experts, rows // experts, width, inner, x.element_size(), *weight.stride())
    facts = {"E": power_of_two(experts), "EVEN": inner % 64 == 0, "BAND": BAND}
    if rows:
        _product[grid](x, weight, ends, out, *sizes, PRECISION=float32_precision(), **facts)
    return out


def _run_outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    grad, x, experts = grad.contiguous(), x.contiguous(), len(ends)
    width, inner = grad.shape[1], x.shape[1]
    out = x.new_empty(experts, width, inner)
    sizes = (len(x) // experts, width, inner, x.element_size())
    grid = lambda meta: (cdiv(width, meta["ROWS"]) * cdiv(inner, meta["COLUMNS"]), experts)  # noqa: E731
    _outer[grid](grad, x, ends, out, *sizes, PRECISION=float32_precision())
    return out


_outer_op = operator(
    "grouped_outer(Tensor grad, Tensor x, Tensor ends) -> Tensor",
    _run_outer,
    lambda grad, x, ends: x.new_empty(len(ends), grad.shape[1], x.shape[1]),
)
_linear = operator(
    "grouped_linear(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    _run,
    lambda x, weight, ends: x.new_empty(len(x), weight.shape[1]),
)
