"""Puts the ops of blocks and of a model's ends on a tape, with the bytes that each of them saves.

First the context that every op gets: the sizes of a micro-batch on a rank, and whose kernels run. T
are a micro-batch's tokens on a context parallel rank, R those between the tensor parallel regions
(T/tp under sequence parallelism). Then casts and copies, residual sums, norms and dropout; GEMMs by
weights and of activations, also in float8 and, on CPU, in float32; GEMMs on a grid of tp ranks,
panel by panel; tensor parallel linear layers; and the weights that zero=3 all-gathers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mtcli.core.config.fp8 import is_narrow
from mtcli.core.config.model import CLASSIFIERS
from mtcli.core.mesh.adapters import chosen_targets
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import VOCAB_MULTIPLE
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.tape.autograd import (
    Gradients,
    Storage,
    Tape,
    Value,
    WeightPass,
    new_gradients,
    same_gradient,
)
from mtcli.core.plan.workload import Workload
from mtcli.kernels.limits import random_bytes

INDEX = 8  # bytes of an int64


class Shapes(NamedTuple):
    """Sizes of one micro-batch on one rank."""

    tokens: float  # T, on a grid of tp ranks those of its row
    rows: float  # R
    hidden: float  # D, on a grid the columns of activations
    inner: float  # D, on a grid the hidden columns of a column-parallel weight
    queries: float  # q
    keys: float  # kv: both, of this rank's groups, whole
    heads: float
    size: int  # bytes of a weight and of an activation
    wide: int  # of a reduction: 4 at least

    @classmethod
    def of(cls, work: Workload) -> "Shapes":
        """The sizes of a workload."""
        m, tp, size = work.model, work.columns, work.sizes.weight
        rows = work.layout.tp_rows
        on_grid = rows > 1
        return cls(
            work.row_tokens,
            work.row_tokens if on_grid else work.tokens / work.sequence_shards,
            m.hidden_size / tp if on_grid else m.hidden_size,
            m.hidden_size / rows,
            m.num_heads * m.head_dim / tp,
            2 * work.kv_heads * m.head_dim / tp,
            m.num_heads / tp,
            size,
            max(4, size),
        )

    @property
    def stream(self) -> float:
        """Bytes of the residual stream [R, D]."""
        return self.rows * self.hidden * self.size


def vocabulary(work: Workload) -> int:
    """A rank's columns of logits, vocabulary padding included."""
    multiple = VOCAB_MULTIPLE * work.columns
    return -(-work.model.vocab_size // multiple) * VOCAB_MULTIPLE


class Kernels(NamedTuple):
    """The device whose kernels run, as far as memory differs by it."""

    cpu: bool
    widens: bool = False  # makes bfloat16's products in float32, as it does float16's

    @classmethod
    def of(cls, device: Device) -> "Kernels":
        """The kernels of a device."""
        return cls(device.name == "cpu", device.widens)


@dataclass(frozen=True)
class TapeContext:
    """The context of the tape's ops: the tape, the step, and whose kernels run."""

    tape: Tape
    work: Workload
    kernels: Kernels
    gathering: "Gathering | None" = None  # of weights that zero=3 shards
    groups: "tuple[Group, ...]" = ()  # a block, its experts, the ends
    of_experts: bool = False  # what they take: all columns of this rank's own tokens
    of_head: int = 0  # what it takes: so many rows of activations

    @cached_property
    def t(self) -> Shapes:
        """Sizes of one micro-batch on one rank."""
        work, sizes = self.work, Shapes.of(self.work)
        if self.of_head:
            shards = sizes.tokens / sizes.rows
            return sizes._replace(tokens=self.of_head * shards, rows=self.of_head)
        if not self.of_experts:
            return sizes
        rows = work.tokens / work.sequence_shards
        return sizes._replace(rows=rows, hidden=work.model.hidden_size)

    @property
    def cpu(self) -> bool:
        """Whether a CPU's kernels run."""
        return self.kernels.cpu

    @property
    def slow(self) -> bool:
        """Whether GEMMs of 16 bits are made in float32, as CPUs make all of float16's."""
        narrow = self.work.sizes.weight == 2
        return self.cpu and narrow and (self.kernels.widens or self.work.precision == "fp16")

    @property
    def by_torch(self) -> bool:
        """Whether torch's functions run where a GPU has kernels of ours: on CPU, and in float64."""
        return self.cpu or self.work.sizes.weight > 4


def trained(ctx: TapeContext, size: float) -> float:
    """Bytes of the gradient of a weight of the model, which is frozen beside adapters."""
    return 0.0 if ctx.work.lora.rank else size


def resized(ctx: TapeContext, x: Value, size: float) -> Value:
    """Casts or resizes x; nothing is saved."""
    return ctx.tape.op([x], [size], new_gradients(x.size))[0]


def reused(ctx: TapeContext, x: Value) -> Value:
    """Views x in the same memory, whose gradient is passed on as it is."""
    return ctx.tape.op([x], [x], same_gradient)[0]


def copied(ctx: TapeContext, x: Value, size: float) -> Value:
    """Copies x, maybe with a vector or other ranks' parts added; the gradient is passed on."""
    return ctx.tape.op([x], [size], same_gradient)[0]


def moved(ctx: TapeContext, x: Value, size: float, back_size: float, beside: float = 0.0) -> Value:
    """Copies, exchanges or casts x: `size` bytes, its gradient's `back_size`, `beside` each way."""
    ctx.tape.moment(beside + size)
    return ctx.tape.op([x], [size], new_gradients(back_size, moment=beside + back_size))[0]


def add(ctx: TapeContext, x: Value, y: Value) -> Value:
    """Adds x and y, whose gradient both get."""
    return concatenated(ctx, [x, y], x.size)


def views(ctx: TapeContext, x: Value, number: int, size: float) -> list[Value]:
    """Splits x into views, whose gradients are joined in `size` bytes."""
    return ctx.tape.op([x], [x] * number, new_gradients(size))


def concatenated(ctx: TapeContext, parts: Sequence[Value], size: float) -> Value:
    """Concatenates the parts in new memory, all of whose gradients are the result's."""
    count = len(parts)
    return ctx.tape.op(parts, [size], lambda tape, grads, saved: count * [grads[0]])[0]


def saved_by(ctx: TapeContext, x: Value, size: float) -> Value:
    """Runs an op that saves its input for backward."""
    return ctx.tape.op([x], [size], new_gradients(x.size), saved=[x])[0]


def norm(ctx: TapeContext, x: Value) -> Value:
    """Runs LayerNorm or RMSNorm of x, with statistics in float32."""
    t = ctx.t
    if ctx.work.layout.tp_rows > 1:
        return _row_norm(ctx, x)
    if ctx.cpu and ctx.work.model.norm == "rmsnorm":
        return _rms_norm_on_cpu(ctx, x)
    return ctx.tape.op([x], [x.size], new_gradients(x.size), saved=[x], more=2 * t.rows * t.wide)[0]


def add_norm(ctx: TapeContext, x: Value, y: Value) -> tuple[Value, Value]:
    """Runs (x + y, its norm), in one kernel where there is one."""
    t = ctx.t
    if ctx.by_torch or ctx.work.layout.tp_rows > 1:
        total = add(ctx, x, y)
        return total, norm(ctx, total)

    size = x.size

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        both = tape.new(size)
        return [both, both]

    stats = 2 * t.rows * t.wide
    total, normed = ctx.tape.op([x, y], [size, size], back, saves_results=[0], more=stats)
    return total, normed


def _row_norm(ctx: TapeContext, x: Value) -> Value:
    """Runs a norm over a row's ranks, by torch's operations in float32."""
    t = ctx.t
    wide = x.size / t.size * t.wide
    cast = wide * (t.size < 4)
    back = new_gradients(x.size, moment=cast + 3 * wide)
    ctx.tape.moment(cast + 2 * wide + x.size * bool(cast))
    return ctx.tape.op([x], [x.size], back, saved=[x], more=2 * t.rows * t.wide)[0]


def _rms_norm_on_cpu(ctx: TapeContext, x: Value) -> Value:
    """Runs x / sqrt(mean square) * weight, op by op in float32."""
    tape, t = ctx.tape, ctx.t
    wide_size, row = x.size / t.size * t.wide, t.rows * t.wide
    wide = resized(ctx, x, wide_size) if t.size < 4 else reused(ctx, x)

    def of_square(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        powers = tape.new(wide_size), tape.new(wide_size)
        out = tape.new(wide_size)
        del powers
        return [out]

    def of_scaled(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        of_x = tape.new(wide_size)
        tape.moment(wide_size + row)
        return [of_x, tape.new(row)]

    def of_weighted(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        out = tape.new(wide_size)
        tape.moment(wide_size)
        return [out]

    square = tape.op([wide], [wide_size], of_square, saved=[wide])[0]
    scale = tape.op([square], [row], new_gradients(wide_size), saves_results=[0])[0]
    del square
    scaled = tape.op([wide, scale], [wide_size], of_scaled, saved=[wide, scale])[0]
    del wide, scale
    kept = [] if ctx.work.lora.rank else [scaled]  # for the gradient of a weight that is trained
    weighted = tape.op([scaled], [wide_size], of_weighted, saved=kept)[0]
    del scaled, kept
    return weighted if t.size >= 4 else resized(ctx, weighted, x.size)


def dropout(ctx: TapeContext, y: Value, onto: Value | None) -> Value:
    """Adds dropout(y) to `onto`; torch saves the mask, a GPU's kernel hashes it again."""
    tape, drop = ctx.tape, ctx.work.model.dropout
    if not drop:
        assert onto is not None, "nothing to do"
        return add(ctx, onto, y)
    if not ctx.by_torch:
        inputs, size = [y] if onto is None else [y, onto], y.size
        added = len(inputs) - 1

        def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
            return [tape.new(size), *(added * [grads[0]])]

        return tape.op(inputs, [size], back)[0]
    tape.moment(random_bytes(y.size / ctx.t.size, round(ctx.t.hidden), ctx.cpu))
    dropped = tape.op([y], [y.size], new_gradients(y.size), more=y.size)[0]
    return dropped if onto is None else add(ctx, onto, dropped)


class Weight(NamedTuple):
    """A weight [width, inner] of a GEMM x W^T: a layer's own, or a `value` that others have too."""

    width: float
    inner: float
    value: Value | None = None  # the head's or an expert's, which is never multiplied in float8
    adapters: int = 0  # trained instead of the weight, which is frozen

    def table(self, tape: Tape) -> Value:
        """The value that is multiplied: its own, or a new leaf of the tape."""
        return tape.leaf(self.width) if self.value is None else self.value


def linear(
    ctx: TapeContext, x: Value, weight: Weight, rows: float = 0.0, activated: bool = False
) -> Value:
    """Runs x W^T, or activation(x) W^T; `rows` of x where it is a view of some.

    A GPU's kernels save x alone, and recompute the activation in its gradient's memory. Where a run
    trains adapters, the weight is frozen, and x is saved for those.
    """
    width, inner, value, adapters = weight
    size, lora = ctx.work.sizes.weight, ctx.work.lora.rank
    recomputes = activated and not adapters and recomputes_activation(ctx)
    if activated and not recomputes:
        return linear(ctx, saved_by(ctx, x, x.size / ctx.work.model.up_factor), weight)
    given = rows * inner * size or x.size / (ctx.work.model.up_factor if recomputes else 1)
    out, weight_bytes = given / inner * width, width * inner * size
    of_input, entered = min(given, x.size), x.size
    table, is_parameter = weight.table(ctx.tape), value is None
    table_rows = table.edge.rows
    narrow = is_parameter and _is_narrow(ctx, width, inner)
    of_x, of_w, of_y = (_copy_bytes(ctx, full, narrow) for full in (given, weight_bytes, out))

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        tape.moment(gemm_bytes(ctx, of_y + of_w, of_input, narrow))
        operand = [tape.new(given)] if recomputes else saved
        gradient = tape.new(entered if recomputes else of_input)
        if lora:
            tape.moment((adapters > 0) * of_input)
            return [gradient, None]
        moment = gemm_bytes(ctx, of_y + of_x, weight_bytes, narrow)
        half = WeightPass(weight_bytes, table_rows, (*operand, grads[0]), moment)
        return [gradient, tape.weight(half, later=is_parameter)]

    copies = of_x + of_w
    if recomputes:
        ctx.tape.moment(given + max(copies, out))
    elif copies:
        ctx.tape.moment(gemm_bytes(ctx, copies, out, narrow))
    by_torch = not (copies or recomputes) and not (ctx.tape.splits and is_parameter)
    made = 0.0 if by_torch and ctx.tape.ends_next else out  # torch's keeps x before it runs
    low = adapters * lora * (given / inner + (adapters > 1) * width * size)  # A x, and B in blocks
    kept = [x] if adapters or recomputes or not lora else []
    return ctx.tape.op([x, table], [made], back, saved=kept, more=low)[0]


def _is_narrow(ctx: TapeContext, width: float, inner: float) -> bool:
    """Whether a parameter's GEMM is made in float8."""
    fp8 = ctx.work.sizes.gemm == "fp8"
    return fp8 and is_narrow(ctx.work.fp8_scaling, round(width), round(inner))


def _copy_bytes(ctx: TapeContext, size: float, narrow: bool) -> float:
    """Bytes of an operand's copy in float8, or on CPU in float32."""
    if narrow:
        return size / ctx.work.sizes.weight
    return 2 * size if ctx.slow else 0.0


def recomputes_activation(ctx: TapeContext) -> bool:
    """Whether a GPU's kernel recomputes activations; a recomputed block has them by then."""
    return not ctx.by_torch and ctx.work.recompute != "full"


def batched_gemm(
    ctx: TapeContext, factors: tuple[Value, Value], size: float, used: float = 0.0
) -> Value:
    """Runs a batched GEMM, in float32 where slow; `used` are the second factor's bytes in use."""
    (first, second), copies = factors, 2 * ctx.slow
    sizes = first.size, used or second.size

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        gradients: Gradients = []
        for operand, other in (sizes, sizes[::-1]):
            tape.moment(gemm_bytes(ctx, copies * (size + other), operand))
            gradients.append(tape.new(operand))
        return gradients

    ctx.tape.moment(gemm_bytes(ctx, copies * sum(sizes), size))
    return ctx.tape.op(factors, [size], back, saved=factors)[0]


def gemm_bytes(ctx: TapeContext, operands: float, result: float, narrow: bool = False) -> float:
    """Peak of a GEMM made of copies of its operands."""
    if narrow or not ctx.slow:
        return operands + result
    return 2 * result + max(operands, result)


def column_linear(ctx: TapeContext, x: Value, shape: tuple[float, float], layer: str) -> Value:
    """Runs this rank's columns of a GEMM, of a block's layer."""
    if ctx.work.layout.tp_rows > 1:
        return grid_gemm(ctx, x, Weight(*shape))
    return linear(ctx, enter(ctx, x), Weight(*shape, adapters=count_adapters(ctx, layer)))


def row_linear(
    ctx: TapeContext, x: Value, shape: tuple[float, float], layer: str, activated: bool = False
) -> Value:
    """Sums every rank's partial GEMMs, of a block's layer, and adds a bias."""
    if ctx.work.layout.tp_rows > 1:
        return row_gemm(ctx, x, shape[1], activated)
    weight = Weight(*shape, adapters=count_adapters(ctx, layer))
    y = leave(ctx, linear(ctx, x, weight, activated=activated))
    return reused(ctx, y) if ctx.work.model.bias else y


def count_adapters(ctx: TapeContext, layer: str) -> int:
    """Counts the adapters of a block's linear layer, such as "attention.qkv"."""
    work = ctx.work
    if not work.lora.rank:
        return 0
    weight = parameters(work.model)[f"blocks.0.{layer}.weight"]
    return len(chosen_targets(weight, work.model, work.lora))


def enter(ctx: TapeContext, x: Value) -> Value:
    """All-gathers the input [T, D] of a tensor parallel region."""
    tape, tp = ctx.tape, ctx.work.layout.tp
    if tp == 1:
        return reused(ctx, x)
    if ctx.work.sequence_parallel:
        return resized(ctx, x, tp * x.size)
    return tape.op([x], [x], new_gradients(x.size))[0]


def leave(ctx: TapeContext, x: Value) -> Value:
    """Reduces the output of a tensor parallel region."""
    tp = ctx.work.layout.tp
    if tp == 1:
        return reused(ctx, x)
    if ctx.work.sequence_parallel:
        return resized(ctx, x, x.size / tp)
    return copied(ctx, x, x.size)


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


# Groups of parameters that zero=3 gathers together; those of the head are among the ends'.
BLOCK, EXPERTS, ENDS, HEAD = range(4)


class Group(NamedTuple):
    """A group of parameters that FSDP2 all-gathers together."""

    name: str
    weights: float  # bytes, rows padded to equal shares
    wide: float  # bytes of their gradients as they are summed
    ranks: int
    last: float = 0.0  # of the last parameter's gradient


class Gathering:
    """Counts FSDP2's buffers on a tape: all-gathered weights, and gradients being reduced.

    A group's weights come in a buffer and are copied out of it. A forward frees the buffer when the
    next group's has been copied out; a backward at once, and gathers the group that follows while
    its own works. The wide buffer that gradients are reduced from stays until the next one is
    needed (torch.distributed.fsdp, _fsdp_param_group.py and _fsdp_collectives.py).
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.gathered: dict[str, Storage] = {}
        self.coming: dict[str, Storage] = {}
        self.order: list[Group] = []  # as forwards ended
        self.deferred: Storage | None = None
        self.reducing: Storage | None = None

    def around(self, group: Group, x: Value, run: Callable[[Value], Value]) -> Value:
        """Runs a group's forward on x, for which its weights are gathered and then freed, as they
        are again for its backward, after which its gradients are reduced."""
        x = marked(self.tape, x, lambda: self.reduced(group))
        self.forward(group)
        y = marked(self.tape, run(x), lambda: self.backward(group))
        self.forward_done(group)
        return y

    def forward(self, group: Group) -> None:
        """Gathers a group before its forward."""
        if group.name in self.gathered:
            return
        buffer = self._gather(group)
        self.gathered[group.name] = self.tape.new(group.weights)
        self.settle()
        self.deferred = buffer

    def forward_done(self, group: Group) -> None:
        """Frees it after its forward, but in a recomputation: the backward needs the weights."""
        if self.tape.last_op < 0:
            self.gathered.pop(group.name, None)
        else:
            self.settle()
        if group not in self.order:
            self.order.append(group)

    def settle(self) -> None:
        """Frees the last buffer of a forward."""
        self.deferred = None

    def backward(self, group: Group) -> None:
        """Gathers a group before its backward, and prefetches the one that follows."""
        self.tape.waiting.append([])
        if group.name not in self.gathered:
            buffer = self._gather(group)
            self.gathered[group.name] = self.tape.new(group.weights)
            del buffer
        if group in self.order:
            self.order.remove(group)
        if self.order and self.order[-1].name not in self.coming:
            ahead = self.order[-1]
            coming = self._gather(ahead)
            if coming is not None:
                self.coming[ahead.name] = coming

    def reduced(self, group: Group) -> None:
        """Reduce-scatters a group's gradients after its backward.

        A name of FSDP2's keeps the last one alive, unless a single rank copies them.
        """
        tape = self.tape
        self.gathered.pop(group.name, None)
        self.reducing = None
        self.reducing = tape.new(group.wide)
        tape.waiting.pop()
        tape.moment(group.wide / group.ranks + group.last * (group.ranks > 1))

    def _gather(self, group: Group) -> Storage | None:
        if group.ranks == 1:
            return None
        if group.name in self.coming:
            return self.coming.pop(group.name)
        self.tape.moment(group.weights * (1 + 1 / group.ranks))
        return self.tape.new(group.weights)


def marked(tape: Tape, x: Value, event: Callable[[], None]) -> Value:
    """Returns x with an event when the backward comes by."""

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        event()
        return [grads[0]]

    return tape.op([x], [x], back)[0]
