"""SUMMA: products of matrices whose blocks lie on a grid of ranks (van de Geijn and Watts, 1997).

A grid has r rows and c columns of ranks; rank (i, j) holds block (i, j) of every matrix. One
relation serves all: with S [X, Y], U [X, P] and V [P, Y], of which P is cut into lcm(r, c) panels,

    S = U V        panels of U are broadcast along rows and those of V down columns   (AB)
    U = S V^T      partial panels are summed along rows, at the ranks that own them   (AB^T)
    V = U^T S      partial panels are summed down columns                             (A^T B)

Each one's gradient is made of the other two (Optimus, arXiv:2104.05343, section 3.1), and one sweep
over the panels makes both: each panel is broadcast once. A panel travels while the one before is
multiplied. S stays where it is, so a caller chooses which matrix does not move. A rank (i, j) keeps
U's columns P of j and V's rows P of i. Blocks of rank r x c: S [X/r, Y/c], U [X/r, P/c],
V [P/r, Y/c].
"""

from collections.abc import Iterator
from functools import cached_property
from math import lcm, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.core.parallel.collectives import Pending, start_broadcast, start_reduce
from mtcli.core.parallel.groups import Axis, Groups
from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.kernels.gemm import add_matmul_, matmul


class Blocks(NamedTuple):
    """What a sweep has made: this rank's blocks; None where they were not asked for."""

    s: Tensor | None
    u: Tensor | None
    v: Tensor | None


class TensorGrid:
    """The grid that this rank is in, and the buffers that panels arrive in, which all layers use.

    `along` has the ranks of this rank's row, `down` those of its column.
    """

    def __init__(self, groups: Groups) -> None:
        self.along, self.down = groups.tp, groups.tp_row
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    @cached_property
    def panels(self) -> int:
        """Panels of a sweep: as few as give each rank of a row, and of a column, whole ones."""
        return lcm(self.along.size, self.down.size)

    def sweep(self, makes: str, *, s: Any = None, u: Any = None, v: Any = None) -> Blocks:
        """Makes "s", "u" or "v", or two of them, from this rank's blocks of the others.

        s += u v, u = s v^T and v = u^T s, each from what was given. Collective over the grid. Sums
        of u and v over ranks are in their own dtype; s is accumulated in float32 at least.
        """
        count = self.panels
        us = (
            self._broadcast(u, 1, self.along, "u")
            if "s" in makes or "v" in makes
            else [None] * count
        )
        vs = (
            self._broadcast(v, 0, self.down, "v")
            if "s" in makes or "u" in makes
            else [None] * count
        )
        of_u, of_v = _Sums(1, self.along, count), _Sums(0, self.down, count)
        made = None
        for panel, (u_XP, v_PY) in enumerate(zip(us, vs, strict=True)):
            if "s" in makes:
                made = _accumulated(made, u_XP, v_PY)
            if "u" in makes:
                of_u.start(panel, matmul(s, v_PY.mT))
            if "v" in makes:
                of_v.start(panel, matmul(u_XP.mT, s))
        made = made.to(u.dtype) if made is not None else None
        return Blocks(made, of_u.finish(), of_v.finish())

    def _broadcast(self, x: Tensor, dim: int, axis: Axis, role: str) -> Iterator[Tensor]:
        """The panels of a matrix whose `dim` an axis cuts, the next one on its way meanwhile."""
        if x.mT.is_contiguous() and not x.is_contiguous():  # a panel is sent as it lies in memory
            yield from (panel.mT for panel in self._broadcast(x.mT, 1 - dim, axis, role))
            return
        own = x.chunk(self.panels // axis.size, dim)

        def start(panel: int) -> tuple[Tensor, Pending | None]:
            owner, index = divmod(panel, len(own))
            mine = owner == axis.rank
            values = own[index].contiguous() if mine else self._buffer(role, panel % 2, own[0])
            return values, start_broadcast(values, axis, owner) if axis.size > 1 else None

        following = start(0)
        for panel in range(self.panels):
            values, pending = following
            if panel + 1 < self.panels:
                following = start(panel + 1)
            if pending is not None:
                pending.wait()
            yield values

    def _buffer(self, role: str, parity: int, like: Tensor) -> Tensor:
        """Memory of a panel's shape, the same in every layer: it grows to the largest."""
        key, size = (role, parity, like.dtype), prod(like.shape)
        if key not in self._buffers or len(self._buffers[key]) < size:
            self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._buffers[key][:size].view(like.shape)


class _Sums:
    """Panels of partial products on their way to the ranks that own them."""

    def __init__(self, dim: int, axis: Axis, count: int) -> None:
        self.dim, self.axis, self.each = dim, axis, count // axis.size
        self.own: list[Tensor] = []
        self.pending: list[tuple[Pending, Tensor]] = []

    def start(self, panel: int, partial: Tensor) -> None:
        """Sends this rank's part of a panel's sum, while the last panel's may be on its way."""
        owner, partial = panel // self.each, partial.contiguous()
        if owner == self.axis.rank:
            self.own.append(partial)
        if self.axis.size > 1:
            self.pending.append((start_reduce(partial, self.axis, owner), partial))
        while len(self.pending) > 1:
            self.pending.pop(0)[0].wait()

    def finish(self) -> Tensor | None:
        """This rank's block of the sum; None where nothing was sent."""
        for pending, _ in self.pending:
            pending.wait()
        if not self.own:
            return None
        return self.own[0] if len(self.own) == 1 else torch.cat(self.own, self.dim)


def _accumulated(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, in float32 at least; no total is zero."""
    if total is None:
        wide = torch.promote_types(a.dtype, torch.float32)
        total = a.new_zeros(a.shape[0], b.shape[1], dtype=wide)
    return add_matmul_(total, a, b)


def gemm(u: Tensor, v: Tensor, grid: TensorGrid, passes: WeightPasses | None = None) -> Tensor:
    """A B: blocks of A [X, P] and B [P, Y] -> A B [X, Y]. The result does not move.

    `passes` may leave the gradient of B for later.
    """
    return _Gemm.apply(u, v, grid, passes)


def gemm_transposed(
    s: Tensor, v: Tensor, grid: TensorGrid, passes: WeightPasses | None = None
) -> Tensor:
    """A B^T: blocks of A [X, Y] and B [P, Y] -> A B^T [X, P]. A does not move."""
    return _GemmTransposed.apply(s, v, grid, passes)


def transposed_gemm(u: Tensor, s: Tensor, grid: TensorGrid) -> Tensor:
    """A^T B: blocks of A [X, P] and B [X, Y] -> A^T B [P, Y]. B does not move."""
    return _TransposedGemm.apply(u, s, grid)


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, v: Tensor, grid: TensorGrid, passes: WeightPasses | None
    ) -> Tensor | None:
        ctx.save_for_backward(u, v)
        ctx.grid, ctx.passes = grid, passes
        return grid.sweep("s", u=u, v=v).s

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (u, v), grid, grad = ctx.saved_tensors, ctx.grid, grad.contiguous()
        if ctx.passes is None or ctx.passes.pending is None:
            _, of_u, of_v = grid.sweep("uv", s=grad, u=u, v=v)
            return of_u, of_v, None, None
        u_alone = u.detach()
        ctx.passes.leave(v, lambda: grid.sweep("v", s=grad, u=u_alone).v)
        return grid.sweep("u", s=grad, v=v).u, None, None, None


class _GemmTransposed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, s: Tensor, v: Tensor, grid: TensorGrid, passes: WeightPasses | None
    ) -> Tensor | None:
        ctx.save_for_backward(s, v)
        ctx.grid, ctx.passes = grid, passes
        return grid.sweep("u", s=s, v=v).u

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (s, v), grid, grad = ctx.saved_tensors, ctx.grid, grad.contiguous()
        if ctx.passes is None or ctx.passes.pending is None:
            of_s, _, of_v = grid.sweep("sv", s=s, u=grad, v=v)
            return of_s, of_v, None, None
        s_alone = s.detach()
        ctx.passes.leave(v, lambda: grid.sweep("v", s=s_alone, u=grad).v)
        return grid.sweep("s", u=grad, v=v).s, None, None, None


class _TransposedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, s: Tensor, grid: TensorGrid) -> Tensor | None:
        ctx.save_for_backward(u, s)
        ctx.grid = grid
        return grid.sweep("v", s=s, u=u).v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, s = ctx.saved_tensors
        of_s, of_u, _ = ctx.grid.sweep("su", s=s, u=u, v=grad.contiguous())
        return of_u, of_s, None
