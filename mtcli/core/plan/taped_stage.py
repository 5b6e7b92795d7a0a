"""A stage's forward and backward of one micro-batch on a tape: ends, blocks, and the peak."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from mtcli.core.plan.in_flight import splits
from mtcli.core.plan.shapes import published_bytes
from mtcli.core.plan.tape import Gradients, Pending, Storage, Tape, Value
from mtcli.core.plan.taped_attention import attention
from mtcli.core.plan.taped_ends import embedded, head, out_of_stage, vocabulary_table
from mtcli.core.plan.taped_experts import mixture
from mtcli.core.plan.taped_layers import add_norm, dropout, mlp, norm
from mtcli.core.plan.taped_ops import BLOCK, ENDS, EXPERTS, Kernels, Kit, same
from mtcli.core.plan.taped_sharding import Gathering, Group, after, before
from mtcli.core.plan.workload import Workload


class Passed(NamedTuple):
    """What one micro-batch holds on a stage: when its forward is done, and at most."""

    each: float  # of a block
    kept: float  # when its forward is done
    left: float  # when its backward is done, until the rest of a split one is
    forward: float  # at most, until it is done
    backward: float  # at most, from there on, but for the rest of a split one
    rest: float  # at most, while that is done
    sent: float  # its input's gradient, held until something else is received
    gathered: float = 0.0  # weights of ends that are there when its forward is done

    @property
    def peaks(self) -> tuple[tuple[float, float], ...]:
        """(its own bytes that are held besides, bytes at most) within an F, a B or I, and a W."""
        return (self.kept, self.forward), (self.kept, self.backward), (self.left, self.rest)

    def beside(self, size: float) -> "Passed":
        """The same where `size` bytes are there from the forward to the backward."""
        forward, backward = self.forward + size, self.backward + size
        return self._replace(kept=self.kept + size, forward=forward, backward=backward)


def block(kit: Kit, x: Value, number: int = 0) -> Value:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    if kit.gathering is None:
        return _kept_or_again(kit, x)
    group, experts = (kit.groups[i]._replace(name=f"{i} of {number}") for i in (BLOCK, EXPERTS))
    kit = replace(kit, groups=(group, experts, kit.groups[ENDS]))
    inside = before(kit.gathering, group, x)
    y = _kept_or_again(kit, inside)
    return after(kit.gathering, group, y)


def _kept_or_again(kit: Kit, x: Value) -> Value:
    if kit.work.recompute == "full":
        return kit.tape.again(lambda x: _block(kit, x), x)
    return _block(kit, x)


def _published(kit: Kit, x: Value) -> Value:
    """A block of code from before 2022, as a whole."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(x.size)]

    more = published_bytes(kit.work) - x.size
    return kit.tape.op([x], [x.size], back, kept=[x], more=more)[0]


def _block(kit: Kit, x: Value) -> Value:
    if not kit.work.flash:
        return _published(kit, x)
    tape, m = kit.tape, kit.work.model
    normed = norm(kit, x)
    y = attention(kit, normed)
    tape.free(normed)
    if m.dropout:
        total = dropout(kit, y, x)
        tape.free(y)
        normed = norm(kit, total)
    else:
        total, normed = add_norm(kit, x, y)
        tape.free(y)
    part = (
        mixture(kit, normed)
        if m.num_experts
        else mlp(kit, normed, m.ffn_hidden_size / kit.work.layout.tp)
    )
    out = dropout(kit, part, total)
    tape.free(part, normed, total)
    return out


@lru_cache(maxsize=4096)
def passed(
    work: Workload,
    kernels: Kernels,
    ends: tuple[bool, bool],
    layers: int,
    groups: tuple[Group, ...] = (),
) -> Passed:
    """One micro-batch's way through a stage and back, the first one, the last, or one between.

    All blocks are alike: the last is run (of those whose weights are gathered the last three), the
    others' bytes are there from the forward on until the backward reaches the embedding.
    """
    plain = _passed(Kit(Tape(_owners(work), splits(work)), work, kernels), ends, layers)
    if not groups:
        return plain
    tape = Tape()
    kit = Kit(tape, work, kernels, Gathering(tape), groups)
    cut = _passed(kit, ends, layers, plain.each)
    gathered = groups[ENDS].weights
    return plain._replace(forward=cut.forward, backward=cut.backward, gathered=gathered)


def _passed(kit: Kit, ends: tuple[bool, bool], layers: int, known: float = 0.0) -> Passed:
    tape, stream, (first, last) = kit.tape, kit.t.stream, ends
    table = vocabulary_table(kit, first and last)
    if kit.gathering is not None:
        kit.gathering.forward(kit.groups[ENDS])
    x = embedded(kit, table) if first else _received(kit, hands_on=not (layers or last))
    start, alone = len(tape.nodes), tape.live - x.size
    x, blocks = _through(kit, x, layers, known)
    end = len(tape.nodes)
    y = head(kit, x, table) if last else out_of_stage(kit, x)
    kept, forward, tape.peak = tape.live, tape.peak, tape.live

    given = tape.new(stream * (not last))
    pending: Pending = {y.made_by: {y.place: same(given)}}  # which the pipeline names as well
    tape.backward(tape.nodes[end:], pending)
    most, tape.peak = tape.peak, tape.live
    tape.backward(tape.nodes[start:end], pending)
    tape.free(blocks.others)
    # Beside what waits there are x and its gradient, the result, and maybe the result's gradient.
    named = stream * (1 + (not first) + (not last)) + given.size * (given.holders == 1)
    half = (tape.live - alone - named) * splits(kit.work) * bool(layers)
    # When the block that is run goes back, the others may have done so, and wait with their halves.
    tape.peak = max(most, tape.peak + max(0.0, blocks.number * (half - blocks.each)))
    tape.new(blocks.number * half)
    tape.backward(tape.nodes[:start], pending)
    if kit.gathering is not None:
        rest = kit.groups[ENDS]
        kit.gathering.reduced(rest, rest.wide, rest.last)
    backward, left = tape.peak, half * layers
    tape.free(given)
    begun = tape.peak = tape.live
    tape.weights()
    within, sent = left + tape.peak - begun, stream * (not first)
    return Passed(blocks.each, kept, left, forward, backward, within, sent)


def _received(kit: Kit, hands_on: bool) -> Value:
    """A stage's input, which the pipeline names until its backward is done. A gradient that is
    handed on as it came is copied for x."""
    tape, stream = kit.tape, kit.t.stream
    x = Value(tape.new(stream))

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(stream) if hands_on else same(grads[0])]

    return tape.op([x], [x], back)[0]


class _Blocks(NamedTuple):
    """A stage's blocks: the bytes that each keeps, and those that are not run one by one."""

    each: float
    number: int
    others: Storage


def _through(kit: Kit, x: Value, layers: int, known: float) -> tuple[Value, _Blocks]:
    """x behind all blocks; what others keep is added when the first is done. `known` is what each
    does, if not 0."""
    tape, run = kit.tape, min(layers, 1 if kit.gathering is None else 3)
    each, number, others = known, layers - run, tape.hold(0.0)
    for place in range(run):
        begun, most, named = tape.live, tape.peak, x.storage.holders
        tape.peak = begun
        y = block(kit, x, place)
        keeps = x.storage.holders > named  # its input, and not a copy alone
        each = known or tape.live - y.size - begun + x.size * keeps
        tape.free(x)
        x, before = y, number * each * (place == 0)
        tape.peak = max(most, tape.peak + before)  # the last block's forward has all others' bytes
        others.size += before
        tape.live += before
    return x, _Blocks(each, number, others)


def _owners(work: Workload) -> int:
    return work.layout.dp * work.layout.cp if work.zero == 1 else 1
