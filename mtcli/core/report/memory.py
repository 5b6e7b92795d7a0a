"""Bytes over the profiled step by how long they live: those that outlive their op, and the rest.

What is allocated in one op of the pipeline and released in a later one is an activation, or the
gradient of one on its way to another stage. What is gone by the end of its op (or of the phase
around the pipeline) is temporary: outputs of products on their way, gathered weights, scratch.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mtcli.core.report.records import Held

Event = dict[str, Any]


class Allocation(NamedTuple):
    """Bytes in memory between two moments; `end` is infinite where nobody released them."""

    start: float
    end: float
    bytes: int


def allocations(events: Iterable[Event], begin: float) -> list[Allocation]:
    """What was allocated since `begin` (seconds of the trace), in seconds since then.

    Memory of the device where there are such events, else of the host. The release of what was
    there before is an allocation of negative bytes that stays.
    """
    told = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    kinds = {event["args"].get("Device Type", 0) for event in told}
    found: list[Allocation] = []
    held: dict[object, Allocation] = {}
    for event in told:
        moment, args = event["ts"] / 1e6 - begin, event["args"]
        if moment < 0 or args.get("Device Type", 0) != max(kinds):
            continue
        change = Allocation(moment, float("inf"), args["Bytes"])
        if change.bytes >= 0:
            held[args["Addr"]] = change
        elif args["Addr"] in held:
            found.append(held.pop(args["Addr"])._replace(end=moment))
        else:
            found.append(change)
    return sorted([*found, *held.values()])


def over_time(found: Sequence[Allocation], bounds: Sequence[float]) -> list[Held]:
    """What is held at each change; `bounds` are the moments between which ops run, in order."""
    changes = []
    for place, one in enumerate(found):
        passing = bisect(bounds, one.start) == bisect(bounds, one.end)
        changes.append((one.start, place, one.bytes, passing))
        if one.end != float("inf"):
            changes.append((one.end, place, -one.bytes, passing))
    kept = temporary = 0
    curve = [Held(0.0, 0, 0)]
    for moment, _, change, passing in sorted(changes):
        temporary += change if passing else 0
        kept += 0 if passing else change
        curve.append(Held(moment, kept, temporary))
    return curve


def thinned(curve: Sequence[Held], points: int) -> list[Held]:
    """At most about `points` of a curve: of each stretch its highest, so that the peak stays."""
    stride = -(-len(curve) // points)
    parts = (curve[i : i + stride] for i in range(0, len(curve), stride))
    return [max(part, key=lambda held: held.total) for part in parts]
