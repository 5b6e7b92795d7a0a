"""Counts the bytes that a rank sends for data parallelism, for the metrics of a step."""

from collections.abc import Collection

from torch import Tensor

from mtcli.core.runtime.health.flight_recorder import Call
from mtcli.core.runtime.health.traffic import sent_by

# Axes along which gradients are summed inside a replica, and those to other replicas.
REDUCED = ("data", "samples", "tokens", "edp", "expert_copies")
EXCHANGED = ("replicas", "replica_group")


class SyncTraffic:
    """Counts the bytes that a rank sends along the axes of data parallelism."""

    def __init__(self, axes: Collection[str]) -> None:
        self.axes, self._bytes = frozenset(axes), 0

    def taken(self) -> int:
        """The bytes sent since the last call, which resets the count."""
        sent, self._bytes = self._bytes, 0
        return sent

    def add(self, count: int) -> None:
        """Adds bytes that another library's collective sends (FSDP2)."""
        self._bytes += count

    def note(self, call: Call, x: Tensor | None, detail: object) -> None:
        """Adds the bytes that a collective on x sends from this rank, if its axis is counted."""
        if call.axis.name not in self.axes or x is None or call.op == "recv":
            return
        self._bytes += sum(sent_by(call, x, detail).values())
