"""Reading a Chrome trace of torch.profiler: kernels, communication and memory of one step.

Times in a trace are microseconds of the profiler's own clock; results are in seconds of it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from mtcli.core.report.records import Kernel

Event = dict[str, Any]
Interval = tuple[float, float]

STEP = "mtcli: step"  # the annotation that ties the profiler's clock to ours
SEND = "gloo:send"


def spans_of(events: Iterable[Event], wanted: Callable[[Event], bool]) -> list[Interval]:
    """The union of the wanted events' intervals, in order and disjoint."""
    return union((e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if wanted(e))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The points that two lists of disjoint ordered intervals share."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: list[Interval]) -> float:
    """The sum of the intervals' lengths."""
    return sum(end - start for start, end in intervals)


def complete(events: Iterable[Event]) -> list[Event]:
    """The events that have a length."""
    return [event for event in events if event.get("ph") == "X" and "dur" in event]


def is_exchange(event: Event) -> bool:
    """Whether an event is communication under way: gloo's on CPU, NCCL's kernels on GPU.

    Not gloo's sends: one is under way until the receiver takes it, and nobody waits for it.
    """
    name = event["name"]
    if name.startswith("gloo:"):
        return not name.startswith(SEND)
    return event.get("cat") == "kernel" and "nccl" in name.lower()


def exchanges(events: list[Event]) -> dict[str, float]:
    """Seconds of communication by name."""
    found: dict[str, float] = {}
    for event in filter(is_exchange, events):
        found[event["name"]] = found.get(event["name"], 0.0) + event["dur"] / 1e6
    return found


def computing(events: list[Event]) -> list[Interval]:
    """When this rank computes: its kernels, or on CPU its operators.

    On CPU an outermost operator that starts no communication computes as a whole; one that does
    may wait inside, so only the tensor operators within it count.
    """
    kernels = [e for e in events if e.get("cat") == "kernel"]
    if kernels:
        return spans_of(kernels, lambda e: not is_exchange(e))
    busy: list[Event] = []
    for outer, inner in outermost(events):
        waits = any(e["name"].startswith("c10d::") for e in (outer, *inner))
        busy += [e for e in inner if e["name"].startswith("aten::")] if waits else [outer]
    return spans_of(busy, lambda e: True)


def outermost(events: list[Event]) -> list[tuple[Event, list[Event]]]:
    """Each outermost CPU operator of each thread, with all that ran inside it."""
    found: list[tuple[Event, list[Event]]] = []
    for thread in _by_thread(events):
        end = -1.0
        for event in thread:
            if event["ts"] >= end:
                found.append((event, []))
                end = event["ts"] + event["dur"]
            else:
                found[-1][1].append(event)
    return found


def kernels(events: list[Event]) -> list[Kernel]:
    """Kernels by name, the longest first; on CPU operators, without the time of those they call."""
    on_device = [(e["name"], e["dur"]) for e in events if e.get("cat") == "kernel"]
    timed = on_device or [pair for thread in _by_thread(events) for pair in _own_times(thread)]
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name, microseconds in timed:
        calls[name] = calls.get(name, 0) + 1
        seconds[name] = seconds.get(name, 0.0) + microseconds / 1e6
    found = [Kernel(name, calls[name], seconds[name]) for name in calls]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def memory_curve(events: Iterable[Event], begin: float) -> list[tuple[float, int]]:
    """(seconds since `begin`, bytes above what was held then) at each allocation and release."""
    changes = sorted(
        (event["ts"] / 1e6 - begin, event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["ts"] / 1e6 >= begin
    )
    held, curve = 0, [(0.0, 0)]
    for moment, change in changes:
        held += change
        curve.append((moment, held))
    return curve


def thinned(curve: list[tuple[float, int]], points: int) -> list[tuple[float, int]]:
    """At most about `points` of a curve: of each stretch its highest, so that the peak stays."""
    stride = -(-len(curve) // points)
    parts = (curve[i : i + stride] for i in range(0, len(curve), stride))
    return [max(part, key=lambda point: point[1]) for part in parts]


def _by_thread(events: list[Event]) -> list[list[Event]]:
    threads: dict[object, list[Event]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            threads.setdefault(event["tid"], []).append(event)
    order = [sorted(thread, key=lambda e: (e["ts"], -e["dur"])) for thread in threads.values()]
    return order


def _own_times(thread: list[Event]) -> list[tuple[str, float]]:
    """(name, microseconds outside the operators it calls) of a thread's operators."""
    own: list[float] = []
    open_now: list[tuple[int, float]] = []  # (index, end) of the operators around this one
    for index, event in enumerate(thread):
        while open_now and event["ts"] >= open_now[-1][1]:
            open_now.pop()
        own.append(event["dur"])
        if open_now:
            own[open_now[-1][0]] -= event["dur"]
        open_now.append((index, event["ts"] + event["dur"]))
    return [(event["name"], seconds) for event, seconds in zip(thread, own, strict=True)]
