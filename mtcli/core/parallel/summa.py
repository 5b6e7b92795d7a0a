"""SUMMA: GEMMs of matrices in blocks on a grid of ranks (van de Geijn and Watts, 1997).

A grid has r rows and c columns of ranks; rank (i, j) holds block (i, j) of every matrix. Three
matrices S [X, Y], U [X, P] and V [P, Y] are related by S = U V, and P is cut into lcm(r, c) panels:

    S = U V        panels of U are broadcast along rows and those of V down columns   (AB)
    U = S V^T      partial panels are summed along rows, at the ranks that own them   (AB^T)
    V = U^T S      partial panels are summed down columns                             (A^T B)

The gradient of each is computed from the other two (Optimus, arXiv:2104.05343, section 3.1). One
sweep over the panels computes both gradients of a GEMM, so each panel is broadcast once. A panel
travels while the previous one is multiplied. S is never sent: callers choose the roles so that the
largest matrix stays. Blocks of a rank: S [X/r, Y/c], U [X/r, P/c], V [P/r, Y/c].
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import repeat
from math import lcm, prod
from typing import Any, cast

import torch
from torch import Tensor

from mtcli.core.parallel.collectives import start_broadcast, start_reduce
from mtcli.core.parallel.groups import Axis, Groups
from mtcli.core.parallel.transport.process_group import PendingWork
from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.kernels.gemm import add_matmul_, matmul


class TensorGrid:
    """This rank's grid, and the buffers for received panels, which all layers share.

    `along` has the ranks of this rank's row, `down` those of its column.
    """

    def __init__(self, groups: Groups) -> None:
        self.along, self.down = groups.tp, groups.tp_row
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}

    @cached_property
    def panels(self) -> int:
        """The number of panels: the least that gives every rank of a row, and of a column, equally
        many."""
        return lcm(self.along.size, self.down.size)

    def sweep(self, makes: str, blocks: dict[str, Tensor]) -> dict[str, Tensor]:
        """Computes the blocks named in `makes`, one or two of "s", "u" and "v", from the others in
        `blocks`.

        Collective over the grid. Sums of u and v over ranks are in their own dtype; s is
        accumulated in float32 at least.
        """
        count = self.panels
        us = vs = cast(Iterator[Tensor], repeat(None, count))  # the sweep reads none of them
        if makes != "u":
            us = self._broadcast(blocks["u"], 1, self.along, "u")
        if makes != "v":
            vs = self._broadcast(blocks["v"], 0, self.down, "v")
        results, sums = {}, {"u": _Sums(1, self.along, count), "v": _Sums(0, self.down, count)}
        total = None
        for panel, (u_XP, v_PY) in enumerate(zip(us, vs, strict=True)):
            if "s" in makes:
                total = _accumulated(total, u_XP, v_PY)
            if "u" in makes:
                sums["u"].start(panel, matmul(blocks["s"], v_PY.mT))
            if "v" in makes:
                sums["v"].start(panel, matmul(u_XP.mT, blocks["s"]))
        if total is not None:
            results["s"] = total = total.to(blocks["u"].dtype)
        return results | {letter: sums[letter].finish() for letter in makes if letter in sums}

    def _broadcast(self, x: Tensor, dim: int, axis: Axis, role: str) -> Iterator[Tensor]:
        """Yields the panels of a matrix whose `dim` is sharded over `axis`, prefetching the
        next."""
        if x.mT.is_contiguous() and not x.is_contiguous():  # send panels without a copy
            yield from (panel.mT for panel in self._broadcast(x.mT, 1 - dim, axis, role))
            return
        owned = x.chunk(self.panels // axis.size, dim)

        def start(panel: int) -> tuple[Tensor, PendingWork]:
            owner, index = divmod(panel, len(owned))
            is_owner = owner == axis.rank
            values = (
                owned[index].contiguous() if is_owner else self._buffer(role, panel % 2, owned[0])
            )
            return values, start_broadcast(values, axis, owner)

        following = start(0)
        for panel in range(self.panels):
            values, pending = following
            if panel + 1 < self.panels:
                following = start(panel + 1)
            pending.wait()
            yield values

    def _buffer(self, role: str, parity: int, like: Tensor) -> Tensor:
        """A receive buffer of a panel's shape, shared by all layers; it grows to the largest."""
        key, size = (role, parity, like.dtype), prod(like.shape)
        if key not in self._buffers or len(self._buffers[key]) < size:
            self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._buffers[key][:size].view(like.shape)


class _Sums:
    """Reduces panels of partial products to the ranks that own them."""

    def __init__(self, dim: int, axis: Axis, count: int) -> None:
        self.dim, self.axis, self.each = dim, axis, count // axis.size
        self.panels: list[Tensor] = []
        self.pending: list[tuple[PendingWork, Tensor]] = []

    def start(self, panel: int, partial: Tensor) -> None:
        """Starts the reduce of a panel; at most one earlier reduce stays in flight."""
        owner, partial = panel // self.each, partial.contiguous()
        if owner == self.axis.rank:
            self.panels.append(partial)
        self.pending.append((start_reduce(partial, self.axis, owner), partial))
        self._wait(1)

    def finish(self) -> Tensor:
        """Returns this rank's block of the sum, and frees its panels."""
        self._wait(0)
        panels, self.panels = self.panels, []
        return panels[0] if len(panels) == 1 else torch.cat(panels, self.dim)

    def _wait(self, left: int) -> None:
        """Waits until at most `left` reduces are in flight."""
        while len(self.pending) > left:
            self.pending.pop(0)[0].wait()


def _accumulated(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, accumulated in float32 at least; a total of None is zero."""
    if total is None:
        wide = torch.promote_types(a.dtype, torch.float32)
        total = a.new_zeros(a.shape[0], b.shape[1], dtype=wide)
    return add_matmul_(total, a, b)


def gemm(u: Tensor, v: Tensor, grid: TensorGrid, passes: WeightPasses | None = None) -> Tensor:
    """A B of blocks A [X, P] and B [P, Y] -> [X, Y]. The result is never sent.

    `passes` may defer the gradient of B to the W pass.
    """
    return _Gemm.apply("s", "uv", u, v, grid, passes)  # type: ignore[no-untyped-call, no-any-return]  # torch


def gemm_transposed(
    s: Tensor, v: Tensor, grid: TensorGrid, passes: WeightPasses | None = None
) -> Tensor:
    """A B^T of blocks A [X, Y] and B [P, Y] -> [X, P]. A is never sent."""
    return _Gemm.apply("u", "sv", s, v, grid, passes)  # type: ignore[no-untyped-call, no-any-return]  # torch


class _Gemm(torch.autograd.Function):
    """Computes one of S, U and V from the other two; in their gradients its gradient replaces
    it."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no containers of tensors
        ctx: Any,
        makes: str,
        operands: str,
        a: Tensor,
        b: Tensor,
        grid: TensorGrid,
        passes: WeightPasses | None,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.makes, ctx.operands, ctx.grid, ctx.passes = makes, operands, grid, passes
        return grid.sweep(makes, dict(zip(operands, (a, b), strict=True)))[makes]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), operands, sweep = ctx.saved_tensors, ctx.operands, ctx.grid.sweep
        # the deferred closure must not keep the graph alive
        blocks = {operands[0]: a.detach(), operands[1]: b.detach(), ctx.makes: grad.contiguous()}
        if ctx.passes is None or ctx.passes.pending is None:
            gradients = sweep(operands, blocks)
            return None, None, gradients[operands[0]], gradients[operands[1]], None, None
        inputs = {letter: block for letter, block in blocks.items() if letter != operands[1]}
        left = ctx.passes.gradient(b, lambda: sweep(operands[1], inputs)[operands[1]])
        return None, None, sweep(operands[0], blocks)[operands[0]], left, None, None
