"""The traffic counter: bytes that a rank's collectives send, and the seconds it waits in them.

Bytes are those of ring algorithms, which are the least possible. With n ranks and a tensor of S
bytes a rank sends 2 (n-1)/n S to the next rank in an all-reduce, (n-1)/n S in a reduce-scatter and
n-1 times its shard in an all-gather (Patarasuk and Yuan, 2009, section 3). A broadcast passes S on
from the root until all have it, and a reduce passes it on to the root: the root's predecessor, or
the root, sends nothing. Messages, rotations and all-to-alls count for their receivers. JSON values
are not counted.
"""

from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from mtcli.core.runtime.health.flight_recorder import Call, Members

if TYPE_CHECKING:
    from torch import Tensor


class Sent(NamedTuple):
    """The bytes that this rank sent to another along an axis."""

    axis: str
    receiver: int  # rank of the world
    bytes: int
    calls: int


class WaitInterval(NamedTuple):
    """An interval, by perf_counter, in which a thread of this rank only waited in a collective."""

    axis: str
    op: str
    start: float
    end: float


class Traffic:
    """Sums the collectives of this rank while a recorder observes them with it."""

    def __init__(self) -> None:
        self.waits: list[WaitInterval] = []
        self._sent: dict[tuple[str, int], Sent] = {}

    @property
    def sent(self) -> list[Sent]:
        """The sums by axis and receiver."""
        return list(self._sent.values())

    def note(self, call: Call, x: "Tensor | None", detail: object) -> None:
        """Adds the bytes that a collective on x sends from this rank."""
        if x is None or call.op == "recv":
            return
        for peer, count in sent_by(call, x, detail).items():
            self._add(call.axis, peer, count)

    def add(self, axis: Members, size: int) -> None:
        """Adds a collective that sends `size` bytes to the next rank of the axis."""
        self._add(axis, (axis.rank + 1) % axis.size, size)

    def waited(self, call: Call, seconds: float) -> None:
        """Notes the interval that a thread waited for a call."""
        end = perf_counter()
        self.waits.append(WaitInterval(call.axis.name, call.op, end - seconds, end))

    def _add(self, axis: Members, peer: int, size: int) -> None:
        key = axis.name, axis.ranks[peer]
        total = self._sent.get(key, Sent(*key, 0, 0))
        self._sent[key] = Sent(*key, total.bytes + size, total.calls + 1)


def sent_by(call: Call, x: "Tensor", detail: object) -> dict[int, int]:
    """Bytes that a call on x sends from this rank, by the receiver's index in the axis."""
    axis, size, rows = call.axis, x.numel() * x.element_size(), len(x) if x.dim() else 1
    n, after = axis.size, (axis.rank + 1) % axis.size
    if call.op == "all_to_all_v":
        assert isinstance(detail, tuple), f"{call.op} tells its rows"
        row = size // max(1, rows)
        return {peer: row * detail[0][peer] for peer in range(n) if peer != axis.rank}
    if call.op == "all_to_all":
        first = axis.rank // rows * rows  # of the ranks that exchange, a part for each
        peers = range(first, first + rows)
        return {peer: size // rows for peer in peers if peer != axis.rank}
    if call.op in ("broadcast", "reduce"):
        ends_here = after if call.op == "broadcast" else axis.rank
        return {} if ends_here == detail else {after: size}
    if call.peer is not None:
        return {call.peer: size}
    ring = {
        "all_reduce": 2 * (n - 1) * size // n,
        "reduce_scatter": (n - 1) * size // n,
        "all_gather": (n - 1) * size,
        "rotate": size,
    }
    return {after: ring[call.op]}
