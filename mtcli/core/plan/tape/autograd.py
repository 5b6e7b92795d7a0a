"""Counts the bytes alive through a forward and its backward: autograd without tensors or torch.

A recipe runs ops on a `Tape`. As in torch, a result is alive while a Python name refers to it or an
op has saved it for backward; then the tape goes back through the ops, each of which makes the
gradients of its inputs. So a peak follows from which sizes are alive together, as in the engine.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol


class Storage:
    """Bytes of a tape's memory, which live as long as something refers to them."""

    __slots__ = ("size", "tape")

    def __init__(self, tape: "Tape", size: float) -> None:
        self.tape, self.size = tape, size
        tape.live += size
        tape.peak = max(tape.peak, tape.live)

    def __del__(self) -> None:
        self.tape.live -= self.size


class Edge(NamedTuple):
    """A source of a tensor, to which its gradient goes: a result of an op, or a weight's rows."""

    node: "Node | None" = None  # None for a stage's input and for weights
    result: int = 0  # of the op's
    rows: int = 0  # of a weight


class Value:
    """A tensor: its memory, and where it came from."""

    __slots__ = ("edge", "storage")

    def __init__(self, storage: Storage, edge: Edge | None = None) -> None:
        self.storage, self.edge = storage, edge or Edge()

    @property
    def size(self) -> float:
        """Bytes of the tensor's memory."""
        return self.storage.size


Gradients = list[Storage | None]
PendingGradients = dict["Node | None", dict[int, Storage]]  # gradients that wait for their op


class Back(Protocol):
    """An op's backward, which may refer to memory by its arguments alone."""

    def __call__(
        self, tape: "Tape", grads: list[Storage], saved: Sequence[Storage], /
    ) -> Gradients:
        """Makes the gradients of an op's inputs from those of its results and what it saved."""


class Node:
    """An op that has run: its inputs, what it saved for backward, and its backward."""

    __slots__ = ("back", "inputs", "saved", "saves")

    def __init__(self, inputs: list[Edge], saved: list[Storage], saves: bool, back: Back) -> None:
        self.inputs, self.saved, self.saves, self.back = inputs, saved, saves, back


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
        self.weight_passes: list[WeightPass] = []
        self.waiting: list[list[Storage]] = []  # gradients of groups of weights, as they come
        self.saves = True  # False in the first forward of what is recomputed
        self.last_op = -1  # of a recomputation; -1 outside one

    def new(self, size: float) -> Storage:
        """Allocates memory."""
        return Storage(self, size)

    def leaf(self, rows: float) -> Value:
        """A weight of some rows, whose gradient is collected as soon as it is there."""
        return Value(self.new(0.0), Edge(rows=max(1, round(rows))))

    def moment(self, size: float) -> None:
        """Counts bytes that are alive for a moment only."""
        self.peak = max(self.peak, self.live + size)

    def op(
        self,
        inputs: Sequence[Value],
        results: Sequence[float | Value],
        back: Back,
        saved: Sequence[Value] = (),
        saves_results: Sequence[int] = (),
        more: float = 0.0,
    ) -> list[Value]:
        """Runs an op. A result is a size, or the value whose memory it shares.

        Saved for backward are the values `saved`, the results at `saves_results`, and `more` bytes.
        """
        storages = [r.storage if isinstance(r, Value) else self.new(r) for r in results]
        kept = [*(value.storage for value in saved), *(storages[index] for index in saves_results)]
        kept += [self.new(more)] if more else []
        node = Node([x.edge for x in inputs], kept if self.saves else [], bool(kept), back)
        self.nodes.append(node)
        if len(self.nodes) == self.last_op:
            raise _AllSaved
        return [Value(storage, Edge(node, index)) for index, storage in enumerate(storages)]

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
        of_x, of_y = x.edge, y.edge

        def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
            pending: PendingGradients = {of_y.node: {of_y.result: grads.pop()}}
            for index in range(len(inner) - 1, -1, -1):
                if index == last:
                    tape._rerun(forward, Value(saved[0], of_x), inner[: last + 1])
                if inner[index] in pending:
                    tape.step(inner[index], pending)
            return [pending[of_x.node].pop(of_x.result)]

        node = Node([of_x], [x.storage], True, back)
        self.nodes.append(node)
        return Value(y.storage, Edge(node))

    def _rerun(self, forward: Callable[[Value], Value], x: Value, inner: Sequence[Node]) -> None:
        """Recomputes what `inner` ops save; the ops after the last that saves do not run."""
        outside = self.nodes, self.last_op
        self.nodes, self.last_op = [], len(inner)
        with suppress(_AllSaved):
            forward(x)
        again, (self.nodes, self.last_op) = self.nodes, outside
        for node, recomputed in zip(inner, again, strict=True):
            node.saved = recomputed.saved

    def backward(self, nodes: Sequence[Node], pending: PendingGradients) -> None:
        """Goes back through the ops, from gradients of results to those of leaves."""
        for node in reversed(nodes):
            if node in pending:
                self.step(node, pending)

    def step(self, node: Node, pending: PendingGradients) -> None:
        """Runs one op's backward."""
        by_index = pending.pop(node)
        grads = [by_index.pop(index) for index in sorted(by_index)]
        gradients = node.back(self, grads, node.saved)
        node.saved = []
        grads.clear()
        of_weights = []
        for edge in node.inputs:
            grad = gradients.pop(0)  # so that no list refers to what is summed
            if grad is None:
                continue
            if edge.rows:
                of_weights.append((grad, edge.rows))
                continue
            slot = pending.setdefault(edge.node, {})
            summed = edge.result in slot  # by autograd, in new memory
            slot[edge.result] = self.new(grad.size) if summed else grad
        grad = None
        self._collect(of_weights)

    def weight(self, half: WeightPass, later: bool = True) -> Storage | None:
        """Makes a weight's gradient, or leaves it for `later` where backwards are split."""
        if not (later and self.splits):
            self.moment(half.moment)
            return self.new(half.size)
        self.weight_passes.append(half)
        return None

    def weights(self) -> None:
        """Runs the weight passes that were left for later, one after another."""
        while self.weight_passes:
            weight_pass = self.weight_passes.pop(0)
            self.moment(weight_pass.moment)
            self._collect([(self.new(weight_pass.size), weight_pass.rows)])

    def _collect(self, of_weights: list[tuple[Storage, int]]) -> None:
        """Takes weights' gradients, each of which is freed before the next."""
        while of_weights:
            grad, rows = of_weights.pop(0)
            if self.waiting:
                self.waiting[-1].append(grad)
            elif rows % self.owners:
                self.moment(grad.size / rows * -(-rows // self.owners) * self.owners)


def new_gradients(*sizes: float, moment: float = 0.0) -> Back:
    """A backward that makes gradients of these sizes; `moment` bytes are alive just before."""

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        tape.moment(moment)
        return [tape.new(size) for size in sizes]

    return back


def same_gradient(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
    """A backward that passes the result's gradient on as it is."""
    return [grads[0]]
