"""Summarises the trace of the profiled step as one rank's `Profiled`.

Memory that is allocated in one op of the pipeline and freed in a later one counts as activations:
tensors saved for backward, or gradients on their way to another stage. Memory that is freed by the
end of its op (or of the phase around the pipeline) is temporary: outputs of GEMMs, gathered
weights, workspaces.
"""

from bisect import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

from mtcli.core.profile import trace as traces
from mtcli.core.profile.intervals import Interval, common, length, union, without
from mtcli.core.profile.records import MemorySample, Profiled, StepRecord, WaitSeconds
from mtcli.core.runtime.health.traffic import Traffic

MEMORY_POINTS = 1000


def summarized(
    trace: dict[str, Any],
    step: StepRecord,
    began: tuple[float, float],
    traffic: Traffic,
) -> Profiled:
    """Summarises a trace of a step, with the traffic and waits of its host.

    `began` is the moment at which the STEP annotation was entered: on the clock of the step's
    stamps, and on that of the waits.
    """
    events = traces.complete(trace["traceEvents"])
    mark = next(e["ts"] / 1e6 for e in events if e["name"] == traces.STEP)
    waits = [(w.start - began[1] + mark, w.end - began[1] + mark) for w in traffic.waits]
    waiting = union(waits)
    computing = without(traces.computing(events), waiting)
    # Of FSDP2's collectives the trace tells more than the host's waits do.
    sharded = any(event["name"].startswith("FSDP::") for event in events)
    traced = events if sharded or not traffic.waits else []
    exchanges = union([*traces.spans_of(traced, traces.is_exchange), *waiting])
    waited = traces.summed((w.op, w.end - w.start) for w in traffic.waits)
    ops = [(s.op.kind, s.start - began[0] + mark, s.end - began[0] + mark) for s in step.spans]
    curve = over_time(allocations(trace["traceEvents"], mark), traces.op_bounds(events, mark))
    return Profiled(
        step=step,
        exchanging=shares_inside(ops, without(exchanges, computing)),
        communication=waited | traces.exchanges(traced),
        overlapped=length(common(exchanges, computing)),
        kernels=traces.kernels(events),
        memory=thinned(curve, MEMORY_POINTS),
        by_axis=traces.seconds_by_axis(events) or _seconds_on_host(traced, traffic),
        sent=traffic.sent,
    )


def waiting_of(step: StepRecord, traffic: Traffic, offset: float) -> WaitSeconds:
    """Seconds that the host waited for collectives in a step.

    `offset` is added to waits to get the clock of the step's stamps.
    """
    waits = union((w.start + offset, w.end + offset) for w in traffic.waits)
    ops = [(span.op.kind, span.start, span.end) for span in step.spans]
    return WaitSeconds(shares_inside(ops, waits), _waited(traffic))


def shares_inside(
    ops: Sequence[tuple[str, float, float]], exposed: list[Interval]
) -> dict[str, float]:
    """Shares, by kind, of the seconds of (kind, start, end) ops that lie in `exposed`."""
    shares = {}
    for kind in sorted({kind for kind, _, _ in ops}):
        of_kind = union((a, b) for k, a, b in ops if k == kind)
        shares[kind] = length(common(of_kind, exposed)) / length(of_kind)
    return shares


def _seconds_on_host(traced: list[traces.Event], traffic: Traffic) -> dict[str, float]:
    """Seconds of waits by axis; exchanges that the recorder does not see are FSDP2's, of dp."""
    seconds = _waited(traffic)
    sharding = [e for e in traced if not e["name"].startswith(traces.RECEIVE)]
    seconds["data"] = seconds.get("data", 0.0) + sum(traces.exchanges(sharding).values())
    return seconds


def _waited(traffic: Traffic) -> dict[str, float]:
    """Seconds that the host waited by axis."""
    return traces.summed((w.axis, w.end - w.start) for w in traffic.waits)


class Allocation(NamedTuple):
    """Bytes allocated between two moments; `end` is infinite where nobody freed them."""

    start: float
    end: float
    bytes: int


def allocations(events: Sequence[traces.Event], begin: float) -> list[Allocation]:
    """Finds the allocations since `begin` (seconds of the trace), in seconds since then.

    Events of the device count where there are any, else the host's. The release of memory from
    before `begin` is an allocation of negative bytes that is never freed.
    """
    changes = traces.memory_changes(events)
    kinds = {event["args"].get("Device Type", 0) for event in changes}
    ended: list[Allocation] = []
    alive: dict[object, Allocation] = {}
    for event in changes:
        moment, args = event["ts"] / 1e6 - begin, event["args"]
        if moment < 0 or args.get("Device Type", 0) != max(kinds):
            continue
        change = Allocation(moment, float("inf"), args["Bytes"])
        if change.bytes >= 0:
            alive[args["Addr"]] = change
        elif args["Addr"] in alive:
            ended.append(alive.pop(args["Addr"])._replace(end=moment))
        else:
            ended.append(change)
    return sorted([*ended, *alive.values()])


def over_time(allocated: Sequence[Allocation], bounds: Sequence[float]) -> list[MemorySample]:
    """Samples live bytes at each change; `bounds` are the moments between ops, in order."""
    changes = []
    for index, allocation in enumerate(allocated):
        passing = bisect(bounds, allocation.start) == bisect(bounds, allocation.end)
        changes.append((allocation.start, index, allocation.bytes, passing))
        if allocation.end != float("inf"):
            changes.append((allocation.end, index, -allocation.bytes, passing))
    activations = temporary = 0
    curve = [MemorySample(0.0, 0, 0)]
    for moment, _, change, passing in sorted(changes):
        temporary += change if passing else 0
        activations += 0 if passing else change
        curve.append(MemorySample(moment, activations, temporary))
    return curve


def thinned(curve: Sequence[MemorySample], points: int) -> list[MemorySample]:
    """Thins a curve to about `points` at most: the highest of each stretch, with the peak."""
    stride = -(-len(curve) // points)
    parts = (curve[i : i + stride] for i in range(0, len(curve), stride))
    return [max(part, key=lambda sample: sample.total) for part in parts]
