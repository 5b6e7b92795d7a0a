"""LayerNorm (arXiv:1607.06450) and RMSNorm (arXiv:1910.07467), fused with a residual add ahead of
them, and with the bias of what is added.

N rows of D columns. Statistics are in float32. On a GPU the forward reads each row once and saves
means and reciprocal deviations [N, 2] for backward; the backward runs a few persistent programs per
SM, each of which sums the gradients of weight and biases over its rows in float32. Those of weight
and bias fill half of an SM's registers at 16384 columns, so rows of more than LONGEST are read in
chunks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import (
    full_row_configs,
    kernel,
    multiprocessors,
    power_of_two,
    prefers_kernel,
    row_grid,
    runs_triton,
)

if TYPE_CHECKING:
    import triton.language as tl


def norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    centred: bool,
    offset: float = 0.0,
) -> Tensor:
    """LayerNorm if `centred`, else RMSNorm, which has no bias, over the last dimension.

    (x - mean) / sqrt(variance + eps) * gain + bias, or x / sqrt(mean square + eps) * gain. The gain
    is weight + offset, added in float32 at least.
    """
    if offset:
        wide = torch.promote_types(x.dtype, torch.float32)
        vectors = gain(weight.to(wide), offset), None if bias is None else bias.to(wide)
        return norm_reference(x.to(wide), *vectors, eps=eps, centred=centred).to(x.dtype)
    if centred:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    assert bias is None, "RMSNorm has no bias"
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def gain(weight: Tensor, offset: float) -> Tensor:
    """weight + offset, in float32 at least; the weight itself where the offset is 0."""
    if not offset:
        return weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset


# Columns of which a tile holds a row, and the next one, beside the sums of two gradients; and of
# three, which leaves room for several programs on an SM. Torch sums the third of more columns.
LONGEST, SUMMED = 8192, 2048
CHUNKS = tuple({"CHUNK": n, "num_warps": warps} for n, warps in ((4096, 16), (4096, 8), (2048, 8)))
_configs = partial(full_row_configs, elements=2048)


# fmt: off
@kernel(_configs, key=["width"])
def _forward(
    x_ptr, y_ptr, y_bias_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, stats_ptr, rows, width, eps,
    offset, CENTRED: tl.constexpr, ADDS: tl.constexpr, Y_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: on
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    real, inside = column < width, (row < rows) & (column < width)
    at = row * width + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if Y_BIAS:
            y += tl.load(y_bias_ptr + column, mask=real, other=0.0).to(tl.float32)
        x += y
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, x, mask=inside)
        # Of the rounded sum, which the backward reads.
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=real, other=0.0).to(tl.float32) + offset
    mean = tl.zeros([ROWS, 1], tl.float32)
    if CENTRED:
        mean = (tl.sum(x, 1) / width)[:, None]
        x = tl.where(real, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    out = x * scale * weight
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out, mask=inside)
    tl.store(stats_ptr + 2 * row, mean, mask=row < rows)
    tl.store(stats_ptr + 2 * row + 1, scale, mask=row < rows)


# fmt: off
@kernel(lambda width, centred: _configs(width), key=["width", "CENTRED"])
def _backward(
    grad_ptr, dsum_ptr, x_ptr, weight_ptr, stats_ptr, out_ptr, parts_ptr, rows, width, offset,
    CENTRED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, Y_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: on
    """Takes whole rows; a program's next ones are on their way while it computes."""
    column = tl.arange(0, BLOCK)[None, :]
    real = column < width
    weight = tl.load(weight_ptr + column, mask=real, other=0.0).to(tl.float32) + offset
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    dy_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=2):
        row = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < rows) & real
        at = row * width + column
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(stats_ptr + 2 * row + 1, mask=row < rows, other=0.0)
        if CENTRED:
            x -= tl.load(stats_ptr + 2 * row, mask=row < rows, other=0.0)
        x = tl.where(inside, x * scale, 0.0)
        dweight += grad * x
        dbias += grad
        grad *= weight
        out = grad - x * (tl.sum(grad * x, 1) / width)[:, None]
        if CENTRED:
            out -= (tl.sum(grad, 1) / width)[:, None]
        out *= scale
        if ADDS:
            out += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy_bias += out
        tl.store(out_ptr + at, out, mask=inside)
    vectors: tl.constexpr = 1 + HAS_BIAS + Y_BIAS
    part = parts_ptr + tl.program_id(0) * vectors * width + tl.arange(0, BLOCK)
    inside_row = tl.arange(0, BLOCK) < width
    tl.store(part, tl.sum(dweight, 0), mask=inside_row)
    if HAS_BIAS:
        tl.store(part + width, tl.sum(dbias, 0), mask=inside_row)
    if Y_BIAS:
        tl.store(part + (vectors - 1) * width, tl.sum(dy_bias, 0), mask=inside_row)


@kernel()
def _read(
    row_ptr, c: tl.constexpr, width: tl.constexpr, KEEPS: tl.constexpr, CHUNK: tl.constexpr
):
    """Chunk c of a row in float32; a mask takes registers, and the last chunk alone may need one.

    What the caches are told tells reads of the same numbers apart: as one, they would be held in
    registers from the first to the second.
    """
    column = c * CHUNK + tl.arange(0, CHUNK)
    policy: tl.constexpr = "evict_last" if KEEPS else "evict_first"
    if (c + 1) * CHUNK <= width:
        return tl.load(row_ptr + column, eviction_policy=policy).to(tl.float32)
    inside = column < width
    return tl.load(row_ptr + column, mask=inside, other=0.0, eviction_policy=policy).to(tl.float32)


# fmt: off
@kernel(CHUNKS, key=["width", "CENTRED"])
def _backward_in_chunks(
    grad_ptr, dsum_ptr, x_ptr, weight_ptr, stats_ptr, out_ptr, parts_ptr, rows,
    width: tl.constexpr, offset, CENTRED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: on
    """Reads each row twice, the second time from the L1 cache: for its means, for what it gives."""
    lane = tl.arange(0, CHUNK)
    chunks: tl.constexpr = (width + CHUNK - 1) // CHUNK
    dweights, dbiases = (), ()
    for _ in tl.static_range(chunks):
        dweights += (tl.zeros([CHUNK], tl.float32),)
        dbiases += (tl.zeros([CHUNK], tl.float32),)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        start = row * width
        mean = tl.load(stats_ptr + 2 * row) if CENTRED else 0.0
        scale = tl.load(stats_ptr + 2 * row + 1)
        of_grad, of_dot = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for c in tl.static_range(chunks):
            grad = _read(grad_ptr + start, c, width, True, CHUNK)
            grad *= _read(weight_ptr, c, width, True, CHUNK) + offset
            of_grad += grad
            of_dot += grad * (_read(x_ptr + start, c, width, True, CHUNK) - mean)
        mean_dot = tl.sum(of_dot, 0) * scale / width
        mean_grad = tl.sum(of_grad, 0) / width
        added_weights, added_biases = (), ()
        for c in tl.static_range(chunks):
            grad = _read(grad_ptr + start, c, width, False, CHUNK)
            x = (_read(x_ptr + start, c, width, False, CHUNK) - mean) * scale
            added_weights += (dweights[c] + grad * x,)
            added_biases += (dbiases[c] + grad,)
            weight = _read(weight_ptr, c, width, False, CHUNK) + offset
            out = grad * weight - x * mean_dot
            if CENTRED:
                out -= mean_grad
            out *= scale
            if ADDS:
                out += _read(dsum_ptr + start, c, width, False, CHUNK)
            column = c * CHUNK + lane
            tl.store(out_ptr + start + column, out, mask=column < width)
        dweights, dbiases = added_weights, added_biases
    part = parts_ptr + tl.program_id(0) * (2 if HAS_BIAS else 1) * width
    for c in tl.static_range(chunks):
        column = c * CHUNK + lane
        tl.store(part + column, dweights[c], mask=column < width)
        if HAS_BIAS:
            tl.store(part + width + column, dbiases[c], mask=column < width)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    centred: bool,
    offset: float = 0.0,
) -> Tensor:
    """`norm_reference`: 2 * N * D * itemsize bytes moved forward, 3 backward."""
    if not prefers_kernel("layer_norm" if centred else "rms_norm", x, x.shape[-1]):
        return norm_reference(x, weight, bias, eps=eps, centred=centred, offset=offset)
    return _norm(x, weight, bias, eps, centred, offset)[0]


def add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    y_bias: Tensor | None = None,
    eps: float,
    centred: bool,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(x + y + y_bias, its norm): 4 * N * D * itemsize bytes moved in each direction.

    `y_bias` [D], or None, is the bias of the linear layer that made y. On a GPU the sum of the
    three is rounded once, and the backward sums the bias's gradient as it makes that of y.
    """
    if not runs_triton(x):
        total = x + (y if y_bias is None else y + y_bias)
        options = {"eps": eps, "centred": centred, "offset": offset}
        return total, norm_reference(total, weight, bias, **options)
    total, normed, _ = _add_norm(x, y, y_bias, weight, bias, eps, centred, offset)
    return total, normed


def _out_and_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, x.new_empty(rows, 2, dtype=torch.float32)


def _gradients(grad: Tensor, dsum: Tensor | None, *saved: Any) -> tuple[Tensor, Tensor]:
    """(gradient of x; gradients of weight, bias and y_bias, of those that there are)."""
    dx, dvectors = _norm_backward(grad, dsum, *saved)
    return dx, dvectors.unbind(0)


def _gradients_of_norm(grad: Tensor, _: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    dx, dvectors = _gradients(grad, None, *saved)
    return dx, *dvectors


def _gradients_of_add(dsum: Tensor, grad: Tensor, _: Tensor, *saved: Any) -> tuple[Any, ...]:
    dx, dvectors = _gradients(grad, dsum, *saved)
    *_, has_y_bias, _ = saved
    dvectors, dy_bias = (dvectors[:-1], dvectors[-1]) if has_y_bias else (dvectors, None)
    return dx, dx, dy_bias, *dvectors


@custom_op(
    "norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool centred, float offset)"
    " -> (Tensor, Tensor)",
    fake=lambda x, *inputs: _out_and_stats(x),
    saved=lambda outputs, x, weight, bias, eps, centred, offset: (
        *(x.contiguous(), weight, outputs[1]),
        *(centred, bias is not None, False, offset),
    ),
    backward=_gradients_of_norm,
)
def _norm(x, weight, bias, *options):
    return _launch_forward(x, None, None, weight, bias, *options)[1:]


@custom_op(
    "add_norm(Tensor x, Tensor y, Tensor? y_bias, Tensor weight, Tensor? bias, float eps,"
    " bool centred, float offset) -> (Tensor, Tensor, Tensor)",
    fake=lambda x, *inputs: (_out_and_stats(x)[0], *_out_and_stats(x)),
    saved=lambda outputs, x, y, y_bias, weight, bias, eps, centred, offset: (
        *(outputs[0], weight, outputs[2]),
        *(centred, bias is not None, y_bias is not None, offset),
    ),
    backward=_gradients_of_add,
)
def _add_norm(x, y, y_bias, weight, bias, *options):
    return _launch_forward(x, y, y_bias, weight, bias, *options)


def _launch_forward(x, y, y_bias, weight, bias, *options):
    """(x + y + y_bias, or x without y; its norm; statistics); the options are eps, centred and
    offset."""
    eps, centred, offset = options
    x, adds = x.contiguous(), y is not None
    y = y.contiguous() if adds else x
    out, stats = _out_and_stats(x)
    total, rows, width = torch.empty_like(x) if adds else x, len(stats), x.shape[-1]
    biases = [weight if vector is None else vector for vector in (y_bias, bias)]
    pointers = (x, y, biases[0], weight, biases[1], total, out, stats)
    flags = (centred, adds, y_bias is not None, bias is not None, power_of_two(width))
    _forward[row_grid(rows)](*pointers, rows, width, eps, offset, *flags)
    return total, out, stats


@custom_op(
    "norm_backward(Tensor grad, Tensor? dsum, Tensor x, Tensor weight, Tensor stats,"
    " bool centred, bool has_bias, bool has_y_bias, float offset) -> (Tensor, Tensor)",
    fake=lambda grad, dsum, x, weight, stats, centred, has_bias, has_y_bias, offset: (
        torch.empty_like(x),
        weight.new_empty(1 + has_bias + has_y_bias, x.shape[-1]),
    ),
)
def _norm_backward(grad, dsum, x, weight, stats, centred, has_bias, has_y_bias, offset):
    """(gradient of x; gradients of weight, bias and y_bias [1 to 3, D])."""
    grad, rows, width = grad.contiguous(), stats.shape[0], x.shape[-1]
    dsum = None if dsum is None else dsum.contiguous()
    block, out = power_of_two(width), torch.empty_like(x)
    sums_apart = has_y_bias and block > SUMMED
    vectors = 1 + has_bias + (has_y_bias and not sums_apart)
    # As many as registers hold.
    most, columns = {1: (6, 10240), 2: (4, 8192), 3: (4, 6144)}[vectors]
    programs = max(1, min(rows, multiprocessors(x) * max(1, min(most, columns // block))))
    parts = x.new_empty(programs, vectors, width, dtype=torch.float32)
    pointers = (grad, grad if dsum is None else dsum, x, weight, stats, out, parts)
    flags = (centred, dsum is not None, has_bias)
    if block <= LONGEST:
        flags = (*flags, has_y_bias and not sums_apart, block)
        _backward[(programs,)](*pointers, rows, width, offset, *flags)
    else:
        _backward_in_chunks[(programs,)](*pointers, rows, width, offset, *flags)
    sums = parts.sum(0)
    if sums_apart:
        sums = torch.cat([sums, out.view(rows, width).sum(0, True, dtype=torch.float32)])
    return out, sums.to(weight.dtype)
