"""Grouped GEMM: a linear layer of all experts at once, with a weight and a range of rows per
expert.

N rows of D sorted by expert, E experts of width F; `ends` [E] int32 are the ends of the ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.gemm import (
    LinearFunction,
    LinearGemms,
    add_gemms_,
    add_matmul_,
    float32_precision,
    linear,
)
from mtcli.kernels.gradient_sink import GradientSink
from mtcli.kernels.triton_launch import cdiv, kernel, power_of_two, prefers_kernel, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

CONFIGS = tuple(
    dict(zip(("ROWS", "COLUMNS", "INNER", "num_warps", "num_stages"), sizes, strict=True))
    for sizes in (
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (64, 256, 64, 8, 3),
        (64, 128, 64, 4, 4),
        (64, 64, 32, 4, 3),
    )
)
BAND = 8  # tiles of rows that share a tile of weights in the L2 cache
MANY, FEW = 1024, 256  # rows of an expert from which, and below which, tiles are large and small


def default_config(rows_each: int, width: int, inner: int, itemsize: int) -> dict[str, int]:
    """The default config; the last one fits float32 in shared memory.

    A tile of 128 x 256 does 85 FLOP per byte that it reads from the L2 cache; 128 x 128 does 64,
    and two of them run at once; 64 x 128 does 43, and wastes less at an expert's end. Odd widths
    reach shared memory through registers, one number at a time, and other widths that are no
    multiple of 8 need more addresses: both take smaller tiles, which leave registers for it.
    """
    if itemsize == 4 or width % 2 or inner % 2:
        return CONFIGS[-1]
    if width % 8 or inner % 8:
        return CONFIGS[2]
    return CONFIGS[0 if rows_each >= MANY else 1 if rows_each >= FEW else 3]


def default_wgrad_config(rows_each: int, *sizes: int) -> dict[str, int]:
    """The default config of `_wgrad`, whose tiles are of a weight and not of rows: never small
    ones."""
    return default_config(max(rows_each, FEW), *sizes)


def grouped_linear_reference(x_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor | None) -> Tensor:
    """x W_e^T for each expert's rows, one expert at a time: [N, D] -> [N, F]."""
    runs = zip(split_rows(x_ND, counts_E, len(weight_EFD)), weight_EFD.unbind(0), strict=True)
    return torch.cat([linear(x, weight) for x, weight in runs])


def split_rows(x_ND: Tensor, counts_E: Tensor | None, experts: int) -> tuple[Tensor, ...]:
    """Each expert's rows: `counts_E` of them, or equally many where that is None."""
    return x_ND.split([len(x_ND) // experts] * experts if counts_E is None else counts_E.tolist())


@kernel()
def locate(ends_ptr, tile, experts, E: tl.constexpr, ROWS: tl.constexpr):
    """Finds (expert, first row, end of its run) of a tile of rows; past the last tile no rows."""
    lane = tl.arange(0, E)
    end = tl.load(ends_ptr + lane, mask=lane < experts, other=0)
    start = tl.load(ends_ptr + lane - 1, mask=(lane > 0) & (lane < experts), other=0)
    tiles = tl.where(lane < experts, (end - start + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    is_expert = lane == expert
    first = tl.sum(tl.where(is_expert, start + (tile - last + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(is_expert, end, 0), 0)


@kernel()
def multiple(n, UNIT: tl.constexpr):
    """A size or stride, of which the compiler is told that UNIT divides it."""
    return n // UNIT * UNIT if UNIT > 1 else n


def units(*sizes: int) -> tuple[int, ...]:
    """The power of 2 in each, 1 of multiples of 16: Triton sees those, and no others, itself."""
    return tuple(n & -n if n % 16 else 1 for n in sizes)


@kernel(CONFIGS, key=["rows_each", "width", "inner", "itemsize"], default=default_config)
def _gemm(
    x_ptr, weight_ptr, ends_ptr, out_ptr, experts, rows_each, width, inner, itemsize,
    of_expert: tl.int64, of_column, of_inner,
    E: tl.constexpr, EVEN: tl.constexpr, UNITS: tl.constexpr, PRECISION: tl.constexpr,
    BAND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out [N, width] = x W_e^T; the `of_` are the weight's strides; EVEN: INNER divides `inner`.

    UNITS divide the sizes from `width` on.
    """
    width, inner = multiple(width, UNITS[0]), multiple(inner, UNITS[1])
    of_expert, of_column = multiple(of_expert, UNITS[2]), multiple(of_column, UNITS[3])
    of_inner = multiple(of_inner, UNITS[4])
    column_tiles = tl.cdiv(width, COLUMNS)
    in_band = BAND * column_tiles
    band, tile = tl.program_id(0) // in_band, tl.program_id(0) % in_band
    expert, first, end = locate(ends_ptr, band * BAND + tile % BAND, experts, E, ROWS)
    if first < end:
        row = first + tl.arange(0, ROWS)
        column = tile // BAND * COLUMNS + tl.arange(0, COLUMNS)
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
        # Rows counted from the tile's first: their numbers need no register during the loop.
        tile_row = tl.arange(0, ROWS)
        at = out_ptr + first.to(tl.int64) * width + tile_row[:, None] * width + column[None, :]
        tl.store(at, total, mask=(tile_row < end - first)[:, None] & inside)


@kernel(CONFIGS, key=["rows_each", "width", "inner", "itemsize"], default=default_wgrad_config)
def _wgrad(
    grad_ptr, x_ptr, ends_ptr, out_ptr, rows_each, width, inner, itemsize, owned_rows,
    of_owner: tl.int64,
    OWNERS: tl.constexpr, ADDS: tl.constexpr, UNITS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out [E * width, inner] = grad^T x over an expert's rows, INNER at a time; plus out if ADDS.

    With OWNERS each owner has `owned_rows` of out's rows; `of_owner` numbers on are the next one's.
    """
    width, inner = multiple(width, UNITS[0]), multiple(inner, UNITS[1])
    of_owner = multiple(of_owner, UNITS[2])
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
        at, valid = row.to(tl.int64), row < end
        grad_at = grad_ptr + at[None, :] * width + f[:, None]
        grad = tl.load(grad_at, mask=valid[None, :] & f_inside, other=0.0)
        x_at = x_ptr + at[:, None] * inner + d[None, :]
        x = tl.load(x_at, mask=valid[:, None] & d_inside, other=0.0)
        total = tl.dot(grad, x, total, input_precision=PRECISION)
    row = expert.to(tl.int64) * width + f
    row_at = out_ptr + row[:, None] * inner
    if OWNERS:
        row_at = out_ptr + (row // owned_rows * of_owner + row % owned_rows * inner)[:, None]
    if ADDS:
        # Half of the columns at a time: next to `total`, all sums would not fit into registers.
        left, right = tl.split(total.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))
        d = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS // 2)
        inside = f_inside & (d < inner)[None, :]
        at = row_at + d[None, :]
        tl.store(at, left + tl.load(at, mask=inside), mask=inside)
        inside = f_inside & (d + COLUMNS // 2 < inner)[None, :]
        at += COLUMNS // 2
        tl.store(at, right + tl.load(at, mask=inside), mask=inside)
    else:
        tl.store(row_at + d[None, :], total, mask=f_inside & d_inside)


def grouped_linear(
    x_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor | None, sink: GradientSink | None = None
) -> Tensor:
    """`grouped_linear_reference`, on a GPU in one launch for all experts, forward and backward.

    6 * N * D * F operations with both gradients. The host does not wait for the numbers of rows. On
    a GPU the weight's gradient is added to its sink, if it has one.
    """
    if not runs_triton(x_ND):
        return grouped_linear_reference(x_ND, weight_EFD, counts_E)
    gemms = grouped_gemms(x_ND, weight_EFD, counts_E)
    return LinearFunction.apply(x_ND, weight_EFD, None, gemms, None, sink)


def add_by_expert(x_NF: Tensor, bias_EF: Tensor | None, counts_E: Tensor | None) -> Tensor:
    """x + b_e for each expert's rows [N, F]; on a GPU the host does not wait for their numbers."""
    if bias_EF is None:
        return x_NF
    if counts_E is None:
        return (x_NF.unflatten(0, (len(bias_EF), -1)) + bias_EF[:, None]).flatten(0, 1)
    if not runs_triton(x_NF):
        return x_NF + bias_EF.repeat_interleave(counts_E, 0)
    return _AddByExpert.apply(x_NF, bias_EF, counts_E)


class _AddByExpert(torch.autograd.Function):
    """`add_by_expert` whose gradient of biases is a grouped GEMM with ones: autograd's would add
    rows in any order."""

    @staticmethod
    def forward(ctx: Any, x_NF: Tensor, bias_EF: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(counts_E)
        return x_NF + bias_EF.repeat_interleave(counts_E, 0, output_size=len(x_NF))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (counts_E,) = ctx.saved_tensors
        # 8 columns, as odd widths are read one number at a time
        ones = grad.new_ones(len(grad), 8)
        sums = _grouped_wgrad(grad, ones, counts_E.cumsum(0, dtype=torch.int32))
        return grad, sums[..., 0], None


def grouped_gemms(x_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor | None) -> LinearGemms:
    """The three GEMMs of all experts on a GPU, for rows, weights and counts like these.

    Equal counts (None) are a batched GEMM of cuBLAS; torch's grouped GEMM runs where it was
    measured to be faster than the Triton kernel, and on Hopper also where neither was measured: on
    an H200 its backward of [8, 8192, 4096 -> 28672] took 48 ms, ours 67. torch's cannot add to a
    sink, so there the kernel computes the weight's gradient: at three other shapes both took the
    same time backward, and a pass takes more.
    """
    if counts_E is None:
        return _batched_gemms(len(weight_EFD))
    ends = counts_E.cumsum(0, dtype=torch.int32)
    # torch's takes bfloat16 in rows of a multiple of 16 bytes.
    fits = x_ND.shape[1] % 8 == 0 == weight_EFD.shape[1] % 8 and x_ND.dtype == torch.bfloat16
    is_hopper = x_ND.is_cuda and torch.cuda.get_device_capability(x_ND.device) == (9, 0)
    unmeasured = "torch" if is_hopper else "mtcli"
    if fits and not prefers_kernel("grouped_linear", x_ND, weight_EFD.shape[1], unmeasured):
        return _torch_gemms(ends)
    return _triton_gemms(ends)


def _batched_gemms(experts: int) -> LinearGemms:
    def runs(x: Tensor) -> Tensor:
        return x.unflatten(0, (experts, -1))

    def add_wgrad(sink: GradientSink, grad: Tensor, x: Tensor) -> None:
        beta, memory_ORD = sink.begin(), sink.blocks_ORD
        if len(memory_ORD) == 1:
            total_EFD = memory_ORD[0].unflatten(0, (experts, -1))
            add_matmul_(total_EFD, runs(grad).transpose(1, 2), runs(x), beta)
            return
        rows = grad.shape[1]
        for expert, (g, x_nD) in enumerate(zip(runs(grad), runs(x), strict=True)):
            add_gemms_(sink.part(expert * rows, rows), g, x_nD, beta)

    return LinearGemms(
        lambda x, weight, bias: torch.bmm(runs(x), weight.transpose(1, 2)).flatten(0, 1),
        lambda grad, weight: torch.bmm(runs(grad), weight).flatten(0, 1),
        lambda grad, x: torch.bmm(runs(grad).transpose(1, 2), runs(x)),
        add_wgrad,
    )


def _triton_gemms(ends: Tensor) -> LinearGemms:
    return LinearGemms(
        lambda x, weight, bias: _grouped_linear(x, weight, ends),
        lambda grad, weight: _grouped_linear(grad, weight.transpose(1, 2), ends),
        lambda grad, x: _grouped_wgrad(grad, x, ends),
        lambda sink, grad, x: _add_grouped_wgrad(sink, grad, x, ends),
    )


def _torch_gemms(ends: Tensor) -> LinearGemms:
    multiply = torch._grouped_mm
    return LinearGemms(
        lambda x, weight, bias: multiply(x, weight.transpose(1, 2), offs=ends),
        lambda grad, weight: multiply(grad, weight, offs=ends),
        lambda grad, x: multiply(grad.transpose(0, 1), x, offs=ends),
        lambda sink, grad, x: _add_grouped_wgrad(sink, grad, x, ends),
    )


def _add_grouped_wgrad(sink: GradientSink, grad: Tensor, x: Tensor, ends: Tensor) -> None:
    _grouped_add_wgrad(sink.blocks_ORD, grad, x, ends, bool(sink.begin()))


@custom_op(
    "grouped_linear(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    fake=lambda x, weight, ends: x.new_empty(len(x), weight.shape[1]),
)
def _grouped_linear(x, weight, ends):
    x, (experts, width, inner) = x.contiguous(), weight.shape
    rows, out = len(x), x.new_empty(len(x), width)

    def grid(meta: Any) -> tuple[int]:
        # Each expert's last tile may have fewer rows.
        bands = cdiv(cdiv(rows, meta["ROWS"]) + experts, BAND)
        return (bands * BAND * cdiv(width, meta["COLUMNS"]),)

    sizes = (experts, rows // experts, width, inner, x.element_size(), *weight.stride())
    flags = {"E": power_of_two(experts), "EVEN": inner % 64 == 0, "BAND": BAND}
    flags["UNITS"] = units(width, inner, *weight.stride())
    if rows:
        _gemm[grid](x, weight, ends, out, *sizes, PRECISION=float32_precision(), **flags)
    return out


@custom_op(
    "grouped_outer(Tensor grad, Tensor x, Tensor ends) -> Tensor",
    fake=lambda grad, x, ends: x.new_empty(len(ends), grad.shape[1], x.shape[1]),
)
def _grouped_wgrad(grad, x, ends):
    out = x.new_empty(len(ends), grad.shape[1], x.shape[1])
    _launch_wgrad(out.flatten(0, 1)[None], grad, x, ends, adds=False)
    return out


@custom_op(
    "grouped_add_outer(Tensor(a!) sums, Tensor grad, Tensor x, Tensor ends, bool adds) -> ()"
)
def _grouped_add_wgrad(sums, grad, x, ends, adds):
    _launch_wgrad(sums, grad, x, ends, adds)


def _launch_wgrad(sums_ORD: Tensor, grad: Tensor, x: Tensor, ends: Tensor, adds: bool) -> None:
    """Writes grad^T x of each expert to the rows of all owners, or adds it."""
    grad, x, experts = grad.contiguous(), x.contiguous(), len(ends)
    width, inner, of_owner = grad.shape[1], x.shape[1], sums_ORD.stride(0)
    sizes = (len(x) // experts, width, inner, x.element_size(), sums_ORD.shape[1], of_owner)
    grid = lambda meta: (cdiv(width, meta["ROWS"]) * cdiv(inner, meta["COLUMNS"]), experts)  # noqa: E731
    flags = {"UNITS": units(width, inner, of_owner), "PRECISION": float32_precision()}
    flags |= {"OWNERS": len(sums_ORD) > 1, "ADDS": adds}
    _wgrad[grid](grad, x, ends, sums_ORD, *sizes, **flags)
