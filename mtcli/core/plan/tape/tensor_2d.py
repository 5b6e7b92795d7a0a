"""GEMMs on a grid of tp ranks on a tape, panel by panel (parallel/tensor_2d.py and summa.py)."""

from collections.abc import Sequence
from typing import NamedTuple

from mtcli.core.config.model import CLASSIFIERS
from mtcli.core.plan.tape.autograd import Gradients, Storage, Tape, Value, WeightPass
from mtcli.core.plan.tape.context import Shapes, TapeContext, vocabulary
from mtcli.core.plan.tape.gemm import Weight
from mtcli.core.plan.tape.ops import copied, saved_by
from mtcli.core.plan.workload import Workload


def grid_gemm(ctx: TapeContext, x: Value, weight: Weight) -> Value:
    """Runs x W^T [T, F] on a grid, whose panels come in buffers of `panel_buffers`: W is [F, D]."""
    (width, inner, value, _), t = weight, ctx.t
    out, weight_bytes = t.tokens * width * t.size, width * inner * t.size
    u, v = _panels(ctx.work, x.size, weight_bytes)
    wide = (out / t.size * t.wide) * (t.size < 4)
    copies = u.copied + v.copied
    ctx.tape.moment(wide + out + copies)
    table, is_parameter = weight.table(ctx.tape), value is None
    table_rows, entered = table.edge.rows, x.size

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        if tape.splits and is_parameter:
            needs, half = (*saved, grads[0]), v.summed + u.copied
            of_weight = tape.weight(WeightPass(weight_bytes, table_rows, needs, half))
            tape.moment(u.summed + v.copied)
            return [tape.new(entered), of_weight]
        tape.moment(_both_summed(u, v) + copies)
        return [tape.new(entered), tape.new(weight_bytes)]

    return ctx.tape.op([x, table], [out], back, saved=[x])[0]


def row_gemm(ctx: TapeContext, x: Value, inner: float, activated: bool) -> Value:
    """Runs x W^T or activation(x) W^T [T, D] on a grid."""
    t, active = ctx.t, x
    if activated:
        active = saved_by(ctx, x, x.size / ctx.work.model.up_factor)
    out, weight_bytes, entered = t.stream, t.inner * inner * t.size, active.size
    u, v = _panels(ctx.work, out, weight_bytes)  # rows of W are contiguous, and are not copied
    table = ctx.tape.leaf(t.inner)
    wide, table_rows = (entered / t.size * t.wide) * (t.size < 4), table.edge.rows

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        if tape.splits:
            needs, half = (*saved, grads[0]), v.summed + u.copied
            of_weight = tape.weight(WeightPass(weight_bytes, table_rows, needs, half))
            tape.moment(wide + entered + u.copied)
            return [tape.new(entered), of_weight]
        summing = (wide or entered) + v.block + v.leaving + v.next_leaving
        rounding = wide + entered + v.block + v.leaving
        tape.moment(max(summing, rounding, entered + v.joined) + u.copied)
        return [tape.new(entered), tape.new(weight_bytes)]

    ctx.tape.moment(u.summed)
    y = ctx.tape.op([active, table], [out], back, saved=[active])[0]
    del active
    return copied(ctx, y, y.size) if ctx.work.model.bias else y


class Panels(NamedTuple):
    """A rank's block of a matrix on a grid."""

    block: float  # bytes
    own: int  # panels in the block
    all: int  # panels in its row or column of blocks

    @property
    def panel(self) -> float:
        """Bytes of a panel."""
        return self.block / self.own

    @property
    def copied(self) -> float:
        """Bytes of a panel's copy that is broadcast, where it is not contiguous in its block."""
        return self.panel * (self.own > 1)

    @property
    def leaving(self) -> float:
        """Bytes of a partial panel that is summed elsewhere while the next one is computed."""
        return self.panel * (self.own < self.all)

    @property
    def next_leaving(self) -> float:
        """Bytes of the next one, where that leaves too."""
        return self.panel * (self.own + 1 < self.all)

    @property
    def joined(self) -> float:
        """Bytes while sums of several panels are copied into one block."""
        return self.block * (1 + (self.own > 1))

    @property
    def summed(self) -> float:
        """Peak of making the block of partial panels."""
        return max(self.block + self.leaving + self.next_leaving, self.joined)


def _panels(work: Workload, u: float, v: float) -> tuple[Panels, Panels]:
    """The panels of a block whose columns the ranks of a row share, and of one of whose rows those
    of a column do."""
    count = work.panels
    return Panels(u, count // work.columns, count), Panels(v, count // work.layout.tp_rows, count)


def _both_summed(u: Panels, v: Panels) -> float:
    """Peak of making both blocks in one sweep."""
    leaving = u.leaving + v.leaving + max(u.next_leaving, v.next_leaving)
    return max(u.block + v.block + leaving, u.joined + v.block + v.leaving, u.block + v.joined)


def panel_buffers(work: Workload, pp_rank: int) -> float:
    """Bytes of the buffers that a grid's panels arrive in, in all layers; 0 without a grid.

    Two for each way, in turns, or one where a rank owns one of two panels.
    """
    if work.layout.tp_rows == 1:
        return 0.0
    t, m, last = Shapes.of(work), work.model, pp_rank == work.layout.pp - 1
    inner = m.dense_ffn_hidden_size
    widths = [t.queries + t.keys / work.kv_sharers, m.up_factor * inner / work.columns]
    widths += [vocabulary(work)] * (last and m.head not in CLASSIFIERS)
    received = t.tokens * (work.columns > 1) + max(widths)
    return min(2, work.panels - 1) * received * m.hidden_size / work.panels * t.size
