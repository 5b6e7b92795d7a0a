"""FSDP2's buffers on a tape: groups of weights as they are all-gathered, and gradients reduced."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mtcli.core.plan.tape.autograd import Gradients, Storage, Tape, Value

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
