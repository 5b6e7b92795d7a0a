"""zero=3 on a tape: when FSDP2 gathers weights, lets go of them, and reduces their gradients.

A group's weights come in a buffer and are copied out of it. A forward lets go of the buffer when
the next group's has been copied out; a backward at once, and gathers the group that follows while
its own works. The wide buffer that gradients are reduced from stays until the next one is needed
(torch.distributed.fsdp, _fsdp_param_group.py and _fsdp_collectives.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

from mtcli.core.plan.tape import Gradients, Storage, Tape, Value


class Group(NamedTuple):
    """Parameters that are gathered together."""

    name: str
    weights: float  # bytes, rows padded to equal shares
    wide: float  # bytes of their gradients as they are summed
    ranks: int
    last: float = 0.0  # of the last parameter's gradient


class Gathering:
    """What FSDP2 holds beside activations, on a tape; nothing where weights are not cut."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.whole: dict[str, Storage] = {}
        self.coming: dict[str, Storage] = {}
        self.order: list[Group] = []  # as forwards ended
        self.deferred: Storage | None = None
        self.reducing: Storage | None = None

    def forward(self, group: Group) -> None:
        """Before a group's forward."""
        if group.name in self.whole:
            return
        buffer = self._gather(group)
        self.whole[group.name] = self.tape.hold(group.weights)
        self.settle()
        self.deferred = buffer

    def forward_done(self, group: Group) -> None:
        """After it."""
        if self.tape.enough < 0:
            self.let_go(group)
        else:  # computed again: the backward that waits needs the weights, and not the buffer
            self.settle()
        if group not in self.order:
            self.order.append(group)

    def settle(self) -> None:
        """Lets go of the last buffer of a forward."""
        if self.deferred is not None:
            self.tape.free(self.deferred)
            self.deferred = None

    def let_go(self, group: Group) -> None:
        """Lets go of gathered weights."""
        if group.name in self.whole:
            self.tape.free(self.whole.pop(group.name))

    def backward(self, group: Group) -> None:
        """Before a group's backward; the one that follows is gathered too."""
        self.tape.waiting.append([])
        if group.name not in self.whole:
            buffer = self._gather(group)
            self.whole[group.name] = self.tape.hold(group.weights)
            if buffer is not None:
                self.tape.free(buffer)
        if group in self.order:
            self.order.remove(group)
        if self.order and self.order[-1].name not in self.coming:
            ahead = self.order[-1]
            buffer = self._gather(ahead)
            if buffer is not None:
                self.coming[ahead.name] = buffer

    def reduced(self, group: Group, wide: float, last: float) -> None:
        """After a group's backward: its gradients are summed, and their rows kept. A name of
        FSDP2's holds the last one, unless a single rank copies them."""
        tape, grads = self.tape, self.tape.waiting.pop()
        self.let_go(group)
        if self.reducing is not None:
            tape.free(self.reducing)
        self.reducing = tape.hold(wide)
        tape.free(*grads)
        tape.moment(wide / group.ranks + last * (group.ranks > 1))

    def _gather(self, group: Group) -> Storage | None:
        if group.ranks == 1:
            return None
        if group.name in self.coming:
            return self.coming.pop(group.name)
        self.tape.moment(group.weights * (1 + 1 / group.ranks))
        return self.tape.hold(group.weights)


def before(gathering: Gathering | None, group: Group, x: Value) -> Value:
    """x, on its way into a group; on the way back the group is done."""
    if gathering is None:
        return x

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        gathering.reduced(group, group.wide, group.last)
        grads[0].holders += 1
        return [grads[0]]

    value = gathering.tape.op([x], [x], back)[0]
    gathering.tape.free(x)  # it has the memory of x, which its caller names
    gathering.forward(group)
    return value


def after(gathering: Gathering | None, group: Group, y: Value) -> Value:
    """y, out of a group; on the way back the group begins."""
    if gathering is None:
        return y

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        gathering.backward(group)
        grads[0].holders += 1
        return [grads[0]]

    value = gathering.tape.op([y], [y], back)[0]
    gathering.tape.free(y)
    gathering.forward_done(group)
    return value
