"""What a forward and its backward hold, op by op: autograd's bookkeeping without tensors or torch.

A recipe runs ops on a `Tape`, which counts the bytes of what is alive. An op's result lives while
somebody names it or a backward waits for it; then the tape goes back through the ops, each of which
gives the gradients of what it took. So a peak follows from which sizes meet, as in the engine.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple


class Storage:
    """Bytes that live as long as someone holds them."""

    __slots__ = ("holders", "size")

    def __init__(self, size: float) -> None:
        self.size, self.holders = size, 1


class Value:
    """A tensor: its memory, and the op that made it, of which it is one of the results."""

    __slots__ = ("made_by", "place", "rows", "storage")

    def __init__(
        self, storage: Storage, made_by: "Node | None" = None, place: int = 0, rows: int = 0
    ) -> None:
        self.storage, self.made_by, self.place, self.rows = storage, made_by, place, rows

    @property
    def size(self) -> float:
        """Bytes of its memory."""
        return self.storage.size


Gradients = Sequence[Storage | None]
Back = Callable[["Tape", list[Storage]], Gradients]  # of results -> of what the op took
Pending = dict["Node | None", dict[int, Storage]]  # gradients that wait for their op


class Node:
    """An op that has run: what it took, what it keeps, and how it goes back."""

    __slots__ = ("back", "kept", "taken", "wants")

    def __init__(self, taken: Sequence[Value], kept: list[Storage], wants: bool, back: Back):
        self.taken, self.kept, self.wants, self.back = taken, kept, wants, back


class Half(NamedTuple):
    """A weight's gradient that is made later: of so many bytes and rows, from what waits for it."""

    size: float
    rows: int
    waits: Sequence[Storage]
    moment: float  # bytes while it is made


class _Enough(Exception):  # noqa: N818
    """All that a backward waits for has been computed again."""


class Tape:
    """Counts live bytes through a forward and its backward.

    `owners` are the ranks that gradients' rows are cut over: rows that do not divide are padded.
    With `splits` the weight halves of products wait for a later op.
    """

    def __init__(self, owners: int = 1, splits: bool = False) -> None:
        self.live = self.peak = 0.0
        self.owners, self.splits = owners, splits
        self.nodes: list[Node] = []
        self.made: list[Storage] = []
        self.halves: list[Half] = []
        self.waiting: list[list[Storage]] = []  # gradients of groups of weights, as they come
        self.keeps = True  # False inside what is computed again later
        self.enough = -1  # so many ops are computed again

    def new(self, size: float) -> Storage:
        """Memory, held by its first owner."""
        self.live += size
        self.peak = max(self.peak, self.live)
        storage = Storage(size)
        self.made.append(storage)
        return storage

    def hold(self, size: float) -> Storage:
        """Memory that outlives what is computed again around it."""
        storage = self.new(size)
        self.made.pop()
        return storage

    def free(self, *held: Storage | Value) -> None:
        """Lets go of each once."""
        for one in held:
            storage = one.storage if isinstance(one, Value) else one
            storage.holders -= 1
            if not storage.holders:
                self.live -= storage.size

    def moment(self, size: float) -> None:
        """Bytes that are there beside all that lives, and gone at once."""
        self.peak = max(self.peak, self.live + size)

    def op(
        self,
        taken: Sequence[Value],
        results: Sequence[float | Value],
        back: Back,
        kept: Sequence[Value] = (),
        keeps_results: Sequence[int] = (),
        more: float = 0.0,
    ) -> list[Value]:
        """Runs an op. A result is a size, or the value whose memory it shares; `kept` values, the
        results where so said, and `more` bytes wait for the backward."""
        storages = []
        for result in results:
            if isinstance(result, Value):
                result.storage.holders += 1
                storages.append(result.storage)
            else:
                storages.append(self.new(result))
        held = [*(value.storage for value in kept), *(storages[place] for place in keeps_results)]
        node = Node(taken, [], bool(held or more), back)
        extra = [self.new(more)] if more else []
        if self.keeps:
            for storage in held:
                storage.holders += 1
            node.kept = held + extra
        else:
            self.free(*extra)
        self.nodes.append(node)
        if len(self.nodes) == self.enough:
            raise _Enough
        return [Value(storage, node, place) for place, storage in enumerate(storages)]

    @property
    def ends_next(self) -> bool:
        """Whether the next op is the last that is computed again."""
        return len(self.nodes) + 1 == self.enough

    def again(self, forward: Callable[[Value], Value], x: Value) -> Value:
        """The result of `forward`, of which x alone is kept until the backward runs it again."""
        outside, self.nodes, self.keeps = self.nodes, [], False
        y = forward(x)
        inner, self.nodes, self.keeps = self.nodes, outside, True
        last = max((index for index, node in enumerate(inner) if node.wants), default=-1)

        def back(tape: Tape, grads: list[Storage]) -> Gradients:
            pending: Pending = {y.made_by: {y.place: grads.pop()}}  # which is named no more
            for index in range(len(inner) - 1, -1, -1):
                if index == last:
                    tape._run_again(forward, x, inner[: last + 1])
                if inner[index] in pending:
                    tape.step(inner[index], pending)
            return [pending[x.made_by].pop(x.place)]

        x.storage.holders += 1
        node = Node([x], [x.storage], True, back)
        self.nodes.append(node)
        return Value(y.storage, node)

    def _run_again(
        self, forward: Callable[[Value], Value], x: Value, inner: Sequence[Node]
    ) -> None:
        """What `inner` ops keep, computed anew; the ops after the last that keeps are not run."""
        outside, made, named = (self.nodes, self.enough), self.made, x.storage.holders
        self.nodes, self.enough, self.made = [], len(inner), []
        with suppress(_Enough):
            forward(x)
        fresh, (self.nodes, self.enough) = self.nodes, outside
        waits: dict[Storage, int] = {}
        for old, new in zip(inner, fresh, strict=True):
            old.kept, old.back = new.kept, new.back
            for storage in new.kept:
                waits[storage] = waits.get(storage, 0) + 1
        for storage in self.made:  # names end where the last op has run
            if storage.holders and not waits.get(storage):
                self.live -= storage.size
            storage.holders = waits.get(storage, 0)
        x.storage.holders = named + waits.get(x.storage, 0)
        self.made = made

    def backward(self, nodes: Sequence[Node], pending: Pending) -> None:
        """Goes back through the ops, from gradients of results to those of leaves."""
        for node in reversed(nodes):
            if node in pending:
                self.step(node, pending)

    def step(self, node: Node, pending: Pending) -> None:
        """One op's way back."""
        given = pending.pop(node)
        grads = [given[place] for place in sorted(given)]
        found = node.back(self, grads)
        self.free(*node.kept, *grads)
        node.kept = []
        leaves = []
        for value, grad in zip(node.taken, found, strict=True):
            if grad is None:
                continue
            if value.rows:
                leaves.append((grad, value.rows))
                continue
            slot = pending.setdefault(value.made_by, {})
            if value.place in slot:  # autograd sums into new memory
                other, total = slot[value.place], self.new(grad.size)
                self.free(other, grad)
                slot[value.place] = total
            else:
                slot[value.place] = grad
        self._collect(leaves)

    def weights(self) -> None:
        """Makes the weights' gradients that were left for later, one after another."""
        for half in self.halves:
            self.moment(half.moment)
            self._collect([(self.new(half.size), half.rows)])
            self.free(*half.waits)
        self.halves = []

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
