"""Counts the bytes alive through a forward and its backward: autograd without tensors or torch.

A recipe runs ops on a `Tape`. A result is alive while somebody names it or it is saved for
backward; then the tape goes back through the ops, each of which makes the gradients of its inputs.
So a peak follows from which sizes are alive together, as in the engine.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple


class Storage:
    """Bytes that are alive as long as something names them."""

    __slots__ = ("holders", "size")

    def __init__(self, size: float) -> None:
        self.size, self.holders = size, 1


class Value:
    """A tensor: its memory, the op that made it, and its index among the op's results."""

    __slots__ = ("index", "made_by", "rows", "storage")

    def __init__(
        self, storage: Storage, made_by: "Node | None" = None, index: int = 0, rows: int = 0
    ) -> None:
        self.storage, self.made_by, self.index, self.rows = storage, made_by, index, rows

    @property
    def size(self) -> float:
        """Bytes of the tensor's memory."""
        return self.storage.size


Gradients = Sequence[Storage | None]
Back = Callable[["Tape", list[Storage]], Gradients]  # of results -> of what the op took
PendingGradients = dict["Node | None", dict[int, Storage]]  # gradients that wait for their op


class Node:
    """An op that has run: its inputs, what it saved for backward, and its backward."""

    __slots__ = ("back", "saved", "saves", "taken")

    def __init__(self, taken: Sequence[Value], saved: list[Storage], saves: bool, back: Back):
        self.taken, self.saved, self.saves, self.back = taken, saved, saves, back


class WeightPass(NamedTuple):
    """The half of a linear layer's backward that makes the weight's gradient; a zero-bubble weight
    pass where it runs later."""

    size: float  # bytes of the weight's gradient
    rows: int
    needs: Sequence[Storage]
    moment: float  # bytes while the gradient is made


class _AllSaved(Exception):  # noqa: N818
    """Stops a recomputation once everything saved for backward has been recomputed."""


class Tape:
    """Counts live bytes through a forward and its backward.

    `owners` are the ranks that shard gradients by rows: rows that do not divide are padded. With
    `splits` the weight halves of products wait for a later op.
    """

    def __init__(self, owners: int = 1, splits: bool = False) -> None:
        self.live = self.peak = 0.0
        self.owners, self.splits = owners, splits
        self.nodes: list[Node] = []
        self.made: list[Storage] = []
        self.weight_passes: list[WeightPass] = []
        self.waiting: list[list[Storage]] = []  # gradients of groups of weights, as they come
        self.saves = True  # False in the first forward of what is recomputed
        self.last_op = -1  # of a recomputation; -1 outside one

    def new(self, size: float) -> Storage:
        """Allocates memory, under one name."""
        self.live += size
        self.peak = max(self.peak, self.live)
        storage = Storage(size)
        self.made.append(storage)
        return storage

    def hold(self, size: float) -> Storage:
        """Allocates memory that outlives a recomputation around it."""
        storage = self.new(size)
        self.made.pop()
        return storage

    def free(self, *named: Storage | Value) -> None:
        """Drops one name of each; memory that no name is left of is freed."""
        for value in named:
            storage = value.storage if isinstance(value, Value) else value
            storage.holders -= 1
            if not storage.holders:
                self.live -= storage.size

    def moment(self, size: float) -> None:
        """Counts bytes that are alive for a moment only."""
        self.peak = max(self.peak, self.live + size)

    def op(
        self,
        taken: Sequence[Value],
        results: Sequence[float | Value],
        back: Back,
        saved: Sequence[Value] = (),
        saves_results: Sequence[int] = (),
        more: float = 0.0,
    ) -> list[Value]:
        """Runs an op. A result is a size, or the value whose memory it shares.

        Saved for backward are the values `saved`, the results at `saves_results`, and `more` bytes.
        """
        storages = []
        for result in results:
            if isinstance(result, Value):
                result.storage.holders += 1
                storages.append(result.storage)
            else:
                storages.append(self.new(result))
        kept = [*(value.storage for value in saved), *(storages[index] for index in saves_results)]
        node = Node(taken, [], bool(kept or more), back)
        extra = [self.new(more)] if more else []
        if self.saves:
            for storage in kept:
                storage.holders += 1
            node.saved = kept + extra
        else:
            self.free(*extra)
        self.nodes.append(node)
        if len(self.nodes) == self.last_op:
            raise _AllSaved
        return [Value(storage, node, index) for index, storage in enumerate(storages)]

    @property
    def ends_next(self) -> bool:
        """Whether the next op is the last of a recomputation."""
        return len(self.nodes) + 1 == self.last_op

    def recompute(self, forward: Callable[[Value], Value], x: Value) -> Value:
        """Runs `forward` with only x saved for backward, which runs it again."""
        outside, self.nodes, self.saves = self.nodes, [], False
        y = forward(x)
        inner, self.nodes, self.saves = self.nodes, outside, True
        last = max((index for index, node in enumerate(inner) if node.saves), default=-1)

        def back(tape: Tape, grads: list[Storage]) -> Gradients:
            pending: PendingGradients = {y.made_by: {y.index: grads.pop()}}
            for index in range(len(inner) - 1, -1, -1):
                if index == last:
                    tape._rerun(forward, x, inner[: last + 1])
                if inner[index] in pending:
                    tape.step(inner[index], pending)
            return [pending[x.made_by].pop(x.index)]

        x.storage.holders += 1
        node = Node([x], [x.storage], True, back)
        self.nodes.append(node)
        return Value(y.storage, node)

    def _rerun(self, forward: Callable[[Value], Value], x: Value, inner: Sequence[Node]) -> None:
        """Recomputes what `inner` ops save; the ops after the last that saves do not run."""
        outside, made, named = (self.nodes, self.last_op), self.made, x.storage.holders
        self.nodes, self.last_op, self.made = [], len(inner), []
        with suppress(_AllSaved):
            forward(x)
        fresh, (self.nodes, self.last_op) = self.nodes, outside
        waits: dict[Storage, int] = {}
        for old, new in zip(inner, fresh, strict=True):
            old.saved, old.back = new.saved, new.back
            for storage in new.saved:
                waits[storage] = waits.get(storage, 0) + 1
        for storage in self.made:  # names end where the last op has run
            if storage.holders and not waits.get(storage):
                self.live -= storage.size
            storage.holders = waits.get(storage, 0)
        x.storage.holders = named + waits.get(x.storage, 0)
        self.made = made

    def backward(self, nodes: Sequence[Node], pending: PendingGradients) -> None:
        """Goes back through the ops, from gradients of results to those of leaves."""
        for node in reversed(nodes):
            if node in pending:
                self.step(node, pending)

    def step(self, node: Node, pending: PendingGradients) -> None:
        """Runs one op's backward."""
        given = pending.pop(node)
        grads = [given[index] for index in sorted(given)]
        gradients = node.back(self, grads)
        self.free(*node.saved, *grads)
        node.saved = []
        leaves = []
        for value, grad in zip(node.taken, gradients, strict=True):
            if grad is None:
                continue
            if value.rows:
                leaves.append((grad, value.rows))
                continue
            slot = pending.setdefault(value.made_by, {})
            if value.index in slot:  # autograd sums into new memory
                other, total = slot[value.index], self.new(grad.size)
                self.free(other, grad)
                slot[value.index] = total
            else:
                slot[value.index] = grad
        self._collect(leaves)

    def weight(self, half: WeightPass, later: bool = True) -> Storage | None:
        """Makes a weight's gradient, or leaves it for `later` where backwards are split."""
        if not (later and self.splits):
            self.moment(half.moment)
            return self.new(half.size)
        for storage in half.needs:
            storage.holders += 1
        self.weight_passes.append(half)
        return None

    def weights(self) -> None:
        """Runs the weight passes that were left for later, one after another."""
        for weight_pass in self.weight_passes:
            self.moment(weight_pass.moment)
            self._collect([(self.new(weight_pass.size), weight_pass.rows)])
            self.free(*weight_pass.needs)
        self.weight_passes = []

    def _collect(self, leaves: Sequence[tuple[Storage, int]]) -> None:
        for grad, rows in leaves:
            if self.waiting:
                self.waiting[-1].append(grad)
                continue
            if rows % self.owners:
                self.moment(grad.size / rows * -(-rows // self.owners) * self.owners)
            self.free(grad)


def leaf(rows: float) -> Value:
    """A weight of some rows, whose gradient is collected as soon as it is there."""
    return Value(Storage(0.0), rows=max(1, round(rows)))


def named_again(storage: Storage) -> Storage:
    """Adds a name to a storage, such as of a gradient that is passed on as it is."""
    storage.holders += 1
    return storage


def new_gradients(*sizes: float, moment: float = 0.0) -> Back:
    """A backward that makes gradients of these sizes; `moment` bytes are alive just before."""

    def back(tape: Tape, grads: list[Storage]) -> Gradients:
        tape.moment(moment)
        return [tape.new(size) for size in sizes]

    return back


def same_gradient(tape: Tape, grads: list[Storage]) -> Gradients:
    """A backward that passes the result's gradient on as it is."""
    return [named_again(grads[0])]
