"""SYRK, BLAS's symmetric rank-k update: alpha X X^T + beta A, of which half the tiles are computed.

A Newton-Schulz iteration (Muon) has two, G = X X^T and b G + c G G^T, and a GEMM that is not
symmetric. Shapes: S matrices of M rows and K columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.gemm import float32_precision
from mtcli.kernels.grouped_gemm import multiple, units
from mtcli.kernels.triton_launch import cdiv, kernel, prefers_kernel

if TYPE_CHECKING:
    import triton.language as tl

CONFIGS = tuple(
    dict(zip(("SIDE", "INNER", "num_warps", "num_stages"), sizes, strict=True))
    for sizes in ((128, 64, 8, 4), (128, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 3))
)


def default_config(rows: int, inner: int, itemsize: int) -> dict[str, int]:
    """Large tiles; smaller ones where few would not fill a GPU, and the smallest for float32, of
    twice the size, and for odd widths, which reach shared memory through registers."""
    if itemsize == 4 or rows % 8 or inner % 8:
        return CONFIGS[-1]
    return CONFIGS[2 if rows <= 1024 else 0]


def syrk_reference(
    x_SMK: Tensor, alpha: float = 1.0, add_SMM: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    """alpha X X^T + beta A of each matrix, with A symmetric: [S, M, K] -> [S, M, M]."""
    if add_SMM is None:
        return alpha * (x_SMK @ x_SMK.mT) if alpha != 1.0 else x_SMK @ x_SMK.mT
    return torch.baddbmm(add_SMM, x_SMK, x_SMK.mT, beta=beta, alpha=alpha)


@kernel(CONFIGS, key=["rows", "inner", "itemsize"], default=default_config)
def _syrk(
    x_ptr, add_ptr, out_ptr, rows, inner, itemsize, of_matrix: tl.int64, of_row, of_inner,
    alpha, beta, UNITS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    SIDE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile on or below the diagonal, stored a second time as its mirror above.

    The `of_` are the strides of x; UNITS divide the sizes from `rows` on, without `itemsize`.
    """
    rows, inner = multiple(rows, UNITS[0]), multiple(inner, UNITS[1])
    of_matrix, of_row = multiple(of_matrix, UNITS[2]), multiple(of_row, UNITS[3])
    of_inner = multiple(of_inner, UNITS[4])
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Tile t is in row i of tiles where i (i + 1) / 2 <= t < (i + 1) (i + 2) / 2. The root is
    # rounded, so it may be one too high or too low.
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    row, column = i * SIDE + tl.arange(0, SIDE), j * SIDE + tl.arange(0, SIDE)
    row_inside, column_inside = (row < rows)[:, None], (column < rows)[None, :]
    k = tl.arange(0, INNER)
    x_ptr += matrix * of_matrix
    at = x_ptr + row.to(tl.int64)[:, None] * of_row + k[None, :] * of_inner
    transposed_at = x_ptr + column.to(tl.int64)[None, :] * of_row + k[:, None] * of_inner
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for done in range(0, inner, INNER):
        left = inner - done
        x = tl.load(at, mask=row_inside & (k[None, :] < left), other=0.0)
        other = tl.load(transposed_at, mask=column_inside & (k[:, None] < left), other=0.0)
        total = tl.dot(x, other, total, input_precision=PRECISION)
        at += INNER * of_inner
        transposed_at += INNER * of_inner
    total *= alpha
    out_at = (matrix * rows + row[:, None]) * rows + column[None, :]
    if ADD:
        added = tl.load(add_ptr + out_at, mask=row_inside & column_inside, other=0.0)
        total += beta * added.to(tl.float32)
    tl.store(out_ptr + out_at, total, mask=row_inside & column_inside)
    if i != j:
        mirror_at = (matrix * rows + column[:, None]) * rows + row[None, :]
        mirror_inside = (column < rows)[:, None] & (row < rows)[None, :]
        tl.store(out_ptr + mirror_at, tl.trans(total), mask=mirror_inside)


def syrk(
    x_SMK: Tensor, alpha: float = 1.0, add_SMM: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    """`syrk_reference`, on a GPU by the Triton kernel, with S M^2 K FLOPs, half of a
    GEMM's, unless torch's was measured to be faster."""
    if not prefers_kernel("syrk", x_SMK, x_SMK.shape[1]):
        return syrk_reference(x_SMK, alpha, add_SMM, beta)
    return _syrk_op(x_SMK, alpha, add_SMM, beta)


@custom_op(
    "syrk(Tensor x, float alpha, Tensor? add, float beta) -> Tensor",
    fake=lambda x, alpha, add, beta: x.new_empty(len(x), x.shape[1], x.shape[1]),
)
def _syrk_op(x, alpha, add, beta):
    matrices, rows, inner = x.shape
    out = x.new_empty(matrices, rows, rows)
    added = out if add is None else add.contiguous()

    def grid(meta):
        side = cdiv(rows, meta["SIDE"])
        return side * (side + 1) // 2, matrices

    flags = {"UNITS": units(rows, inner, *x.stride()), "PRECISION": float32_precision()}
    sizes = (rows, inner, x.element_size(), *x.stride())
    _syrk[grid](x, added, out, *sizes, alpha, beta, ADD=add is not None, **flags)
    return out
