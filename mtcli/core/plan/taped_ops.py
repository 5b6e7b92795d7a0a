"""The ops that layers are made of, on a tape: products, collectives, copies.

Each gives its result and leaves its input to the caller. T are a micro-batch's tokens on a context
parallel rank, R those between the tensor parallel regions (T/tp under sequence parallelism).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mtcli.core.config.fp8 import is_narrow
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.shapes import Shapes
from mtcli.core.plan.tape import Gradients, Half, Storage, Tape, Value, leaf
from mtcli.core.plan.taped_sharding import Gathering, Group
from mtcli.core.plan.workload import Workload

BLOCK, EXPERTS, ENDS = range(3)  # groups of parameters that zero=3 gathers together


class Kernels(NamedTuple):
    """Whose kernels run."""

    cpu: bool
    widens: bool = False  # makes bfloat16's products in float32, as it does float16's

    @classmethod
    def of(cls, device: Device) -> "Kernels":
        """A device's."""
        return cls(device.name == "cpu", device.widens)


@dataclass(frozen=True)
class Kit:
    """What a recipe is written with: the tape, the step, and whose kernels run."""

    tape: Tape
    work: Workload
    kernels: Kernels
    gathering: Gathering | None = None  # of weights cut over data ranks
    groups: tuple[Group, ...] = ()  # a block, its experts, the ends

    @cached_property
    def t(self) -> Shapes:
        """The sizes of one micro-batch on one rank."""
        return Shapes.of(self.work)

    @property
    def cpu(self) -> bool:
        """Whether a CPU's kernels run."""
        return self.kernels.cpu

    @property
    def slow(self) -> bool:
        """Whether products of 16 bits are made in float32, as CPUs make all of float16's."""
        narrow = self.work.sizes.weight == 2
        return self.cpu and narrow and (self.kernels.widens or self.work.precision == "fp16")

    @property
    def by_torch(self) -> bool:
        """Whether torch's functions run where a GPU has kernels of ours: on CPU, and in float64."""
        return self.cpu or self.work.sizes.weight > 4

    @property
    def sequence(self) -> bool:
        """Whether tokens are cut between tensor parallel regions."""
        return self.work.sequence_parallel


def resized(kit: Kit, x: Value, size: float) -> Value:
    """x in another dtype or size, of which the backward needs to know nothing."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(x.size)]

    return kit.tape.op([x], [size], back)[0]


def reused(kit: Kit, x: Value) -> Value:
    """x in the same memory, whose gradient is handed on as it is."""
    return kit.tape.op([x], [x], lambda tape, grads: [same(grads[0])])[0]


def add(kit: Kit, x: Value, y: Value) -> Value:
    """x + y, whose gradient both get."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [same(grads[0]), same(grads[0])]

    return kit.tape.op([x, y], [x.size], back)[0]


def add_bias(kit: Kit, x: Value) -> Value:
    """x and a bias by row."""
    return kit.tape.op([x], [x.size], lambda tape, grads: [same(grads[0])])[0]


def apart(kit: Kit, x: Value, number: int, size: float) -> list[Value]:
    """Views of x, whose gradients are put together again in `size` bytes."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(size)]

    return kit.tape.op([x], [x] * number, back)


def joined(kit: Kit, parts: Sequence[Value], size: float) -> Value:
    """The parts in memory of their own, whose gradients are views."""
    return kit.tape.op(parts, [size], lambda tape, grads: [same(grads[0]) for _ in parts])[0]


def kept_by(kit: Kit, x: Value, size: float) -> Value:
    """An op that keeps its input."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(x.size)]

    return kit.tape.op([x], [size], back, kept=[x])[0]


def linear(
    kit: Kit,
    x: Value,
    shape: tuple[float, float],
    rows: float = 0.0,
    weight: Value | None = None,
    plain: bool = False,
) -> Value:
    """x W^T of a weight [width, inner]: a parameter's, or one of the experts' (`weight`), of whose
    input x `rows` are its own. `plain` ones are never in float8."""
    (width, inner), size = shape, kit.work.sizes.weight
    given = rows * inner * size or x.size
    out, whole = given / inner * width, width * inner * size
    of_input = min(given, x.size)
    table = leaf(width) if weight is None else weight
    scaling = kit.work.fp8_scaling
    fp8 = kit.work.sizes.gemm == "fp8" and not plain
    narrow = fp8 and is_narrow(scaling, round(width), round(inner))
    of_x, of_w, of_y = (_copied(kit, full, narrow) for full in (given, whole, out))

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        tape.moment(while_made(kit, of_y + of_w, of_input, narrow))
        found = tape.new(of_input)
        of_weight = while_made(kit, of_y + of_x, whole, narrow)
        if tape.splits and weight is None:
            waits = [same(x.storage), same(grads[0])]
            tape.halves.append(Half(whole, table.rows, waits, of_weight))
            return [found, None]
        tape.moment(of_weight)
        return [found, tape.new(whole)]

    copies = of_x + of_w
    if copies:
        kit.tape.moment(while_made(kit, copies, out, narrow))
    by_torch = not copies and not (kit.tape.splits and weight is None)
    made = 0.0 if by_torch and kit.tape.ends_next else out  # torch's keeps x before it runs
    return kit.tape.op([x, table], [made], back, kept=[x])[0]


def _copied(kit: Kit, size: float, narrow: bool) -> float:
    """Bytes of the copy of an operand that is multiplied in float8, or on CPU in float32."""
    if narrow:
        return size / kit.work.sizes.weight
    return 2 * size if kit.slow else 0.0


def while_made(kit: Kit, operands: float, result: float, narrow: bool = False) -> float:
    """Bytes at once while a product is made of copies of its operands."""
    if narrow or not kit.slow:
        return operands + result
    return 2 * result + max(operands, result)


Multiply = Callable[[Kit, Value, tuple[float, float]], Value]


def activated_linear(
    kit: Kit, x: Value, shape: tuple[float, float], weight: Value | None = None
) -> Value:
    """activation(x) W^T; `weight` is an expert's. A GPU's kernels keep x alone and make the
    activation's result again, where its gradient was."""
    if not remakes(kit):
        active = kept_by(kit, x, x.size / gates(kit))
        return then(kit, active, linear(kit, active, shape, weight=weight))
    (width, inner), size = shape, kit.work.sizes.weight
    given, whole = x.size / gates(kit), width * inner * size
    out = given / inner * width
    narrow = kit.work.sizes.gemm == "fp8" and is_narrow(
        kit.work.fp8_scaling, round(width), round(inner)
    )
    of_x, of_w, of_y = (_copied(kit, full, narrow) for full in (given, whole, out))
    table = leaf(width) if weight is None else weight

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        tape.moment(of_y + of_w + given)
        result = tape.new(given)
        found = tape.new(x.size)
        if tape.splits and weight is None:
            waits = [result, same(grads[0])]
            tape.halves.append(Half(whole, table.rows, waits, of_y + of_x + whole))
            return [found, None]
        tape.moment(of_y + of_x + whole)
        of_weight = tape.new(whole)
        tape.free(result)
        return [found, of_weight]

    kit.tape.moment(given + max(of_x + of_w, out))
    return kit.tape.op([x, table], [out], back, kept=[x])[0]


def remakes(kit: Kit) -> bool:
    """Whether activations are made again in the backward: by a GPU's kernel, but in a block that is
    computed again, which has them by then."""
    return not kit.by_torch and kit.work.recompute != "full"


def gates(kit: Kit) -> int:
    """Columns of the first product for one of the second: SwiGLU has a gate beside each."""
    return 2 if kit.work.model.activation == "swiglu" else 1


def enter(kit: Kit, x: Value) -> Value:
    """A tensor parallel region's input [T, D]."""
    tape, tp = kit.tape, kit.work.layout.tp
    if tp == 1 or kit.work.tp_mode == "2d":  # whose blocks travel one at a time
        return reused(kit, x)
    if kit.sequence:
        return resized(kit, x, tp * x.size)
    return tape.op([x], [x], lambda tape, grads: [tape.new(x.size)])[0]


def leave(kit: Kit, x: Value) -> Value:
    """The summed output of a tensor parallel region."""
    tape, tp = kit.tape, kit.work.layout.tp
    if tp == 1:
        return reused(kit, x)
    if kit.sequence:
        return resized(kit, x, x.size / tp)
    return tape.op([x], [x.size], lambda tape, grads: [same(grads[0])])[0]


def column_linear(kit: Kit, x: Value, shape: tuple[float, float]) -> Value:
    """This rank's columns of a product."""
    gathered = enter(kit, x)
    y = linear(kit, gathered, shape, kit.t.tokens)
    kit.tape.free(gathered)
    return y


def row_linear(
    kit: Kit, x: Value, shape: tuple[float, float], multiply: Multiply = linear
) -> Value:
    """The sum of every rank's partial products, and a bias."""
    tape = kit.tape
    partial = multiply(kit, x, shape)
    y = leave(kit, partial)
    tape.free(partial)
    if kit.work.model.bias:
        total = add_bias(kit, y)
        tape.free(y)
        y = total
    return y


def moved(kit: Kit, x: Value, size: float, back_size: float, beside: float = 0.0) -> Value:
    """x laid out anew: `size` bytes there, `back_size` of its gradient, `beside` on both ways."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        tape.moment(beside + back_size)
        return [tape.new(back_size)]

    kit.tape.moment(beside + size)
    return kit.tape.op([x], [size], back)[0]


def then(kit: Kit, old: Value, new: Value) -> Value:
    """The new value, after which nobody names the old one."""
    kit.tape.free(old)
    return new


def same(held: Storage) -> Storage:
    """What is held once more, such as a gradient that is handed on as it is."""
    held.holders += 1
    return held
