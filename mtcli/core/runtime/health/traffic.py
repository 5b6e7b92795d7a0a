"""The traffic counter: bytes that a rank's collectives move, and how long it waits for them.

Bytes are counted as a ring of the axis moves them, which no algorithm undercuts: of a tensor of S
bytes on n ranks each gives its next rank 2 (n-1)/n S in an all-reduce, (n-1)/n S in a
reduce-scatter and (n-1) times its part in an all-gather (Patarasuk and Yuan, 2009, section 3). A
broadcast passes S from the root on until all have it, and a reduction on to the root: the root's
predecessor, or the root, gives nothing. What is for one rank alone, in a message, a rotation or an
all-to-all, is counted for that rank. Values that travel as JSON are not counted.
"""

from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from mtcli.core.runtime.health.flight_recorder import Call, Members

if TYPE_CHECKING:
    from torch import Tensor


class Sent(NamedTuple):
    """What this rank gave another one along an axis."""

    axis: str
    receiver: int  # rank of the world
    bytes: int
    calls: int


class WaitInterval(NamedTuple):
    """An interval in which a thread of this rank did nothing but a collective, by perf_counter."""

    axis: str
    op: str
    start: float
    end: float


class Traffic:
    """The collectives of this rank while a recorder holds it."""

    def __init__(self) -> None:
        self.waits: list[WaitInterval] = []
        self._sent: dict[tuple[str, int], Sent] = {}

    @property
    def sent(self) -> list[Sent]:
        """The sums by axis and receiver."""
        return list(self._sent.values())

    def note(self, call: Call, x: "Tensor | None", detail: object) -> None:
        """Adds what a collective on x makes this rank send."""
        if x is None or call.op == "recv":
            return
        for peer, count in sent_by(call, x, detail).items():
            self._add(call.axis, peer, count)

    def add(self, axis: Members, size: int) -> None:
        """Adds a collective by its bytes to the next rank of the axis."""
        self._add(axis, (axis.rank + 1) % axis.size, size)

    def waited(self, call: Call, seconds: float) -> None:
        """Notes that a call has ended, for which its thread waited."""
        end = perf_counter()
        self.waits.append(WaitInterval(call.axis.name, call.op, end - seconds, end))

    def _add(self, axis: Members, peer: int, size: int) -> None:
        key = axis.name, axis.ranks[peer]
        total = self._sent.get(key, Sent(*key, 0, 0))
        self._sent[key] = Sent(*key, total.bytes + size, total.calls + 1)


def sent_by(call: Call, x: "Tensor", detail: object) -> dict[int, int]:
    """Bytes for each index in the axis that a call on x sends to."""
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
