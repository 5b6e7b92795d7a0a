"""Reads torch.profiler's Chrome trace of a step, and writes it with every pipeline rank's ops.

A trace has microseconds of the profiler's clock; functions here return seconds of that clock. The
written trace opens in Perfetto and in chrome://tracing. Its ops are those of the profiled step, on
rank 0's clock, shifted to the profiler's clock by the STEP annotation, which both clocks time.
"""

import json
from bisect import bisect, bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

from mtcli.core.profile.breakdown import speakers
from mtcli.core.profile.intervals import Interval, union
from mtcli.core.profile.records import KernelTime, RankRecord
from mtcli.core.runtime.atomic_writes import aside

Event = dict[str, Any]

STEP = "mtcli: step"  # the annotation that ties the profiler's clock to ours
OP = "mtcli: op "  # begins the annotation of an op of the pipeline
GROUP = "Process Group Description"  # of an NCCL kernel: the axis whose communicator it uses
ITEM_BYTES = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2}
SEND, RECEIVE = "gloo:send", "gloo:recv"
PROCESS = 10**9  # above any process id, so that our tracks have a process of their own


def spans_of(events: Iterable[Event], selects: Callable[[Event], bool]) -> list[Interval]:
    """The union of the intervals of selected events, in order and disjoint."""
    return union((e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if selects(e))


def complete(events: Iterable[Event]) -> list[Event]:
    """Selects the events that have a length."""
    return [event for event in events if event.get("ph") == "X" and "dur" in event]


def is_exchange(event: Event) -> bool:
    """Whether an event is communication that a rank waits for: of gloo, or an NCCL kernel.

    A gloo send is none: it lasts until the receiver takes it, and nobody waits for it.
    """
    name = event["name"]
    if name.startswith("gloo:"):
        return not name.startswith(SEND)
    return event.get("cat") == "kernel" and "nccl" in name.lower()


def exchanges(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of communication by name."""
    return summed((e["name"], e["dur"] / 1e6) for e in events if is_exchange(e))


def seconds_by_axis(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of NCCL's kernels by the axis whose communicator they use; none on CPU."""
    pairs = ((e.get("args", {}).get(GROUP), e) for e in events if is_exchange(e))
    return summed((axis, event["dur"] / 1e6) for axis, event in pairs if axis)


def summed(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sums of seconds by name."""
    totals: defaultdict[str, float] = defaultdict(float)
    for name, amount in seconds:
        totals[name] += amount
    return dict(totals)


def sharding_bytes(events: Sequence[Event]) -> list[tuple[str, int]]:
    """Finds (axis, bytes to the next rank of a ring) of each collective that torch's FSDP2 starts.

    Bytes follow from tensor sizes: an all-gather or reduce-scatter sends all but this rank's shard.
    Needs a trace with shapes.
    """
    sent = []
    for event, range_around in sharding(events):
        (out, given), kind = event["args"]["Input Dims"][:2], event["args"]["Input type"][0]
        axis = "edp" if "experts" in range_around["name"] else "data"
        sent.append((axis, abs(prod(out) - prod(given)) * ITEM_BYTES[kind]))
    return sent


def sharding(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Finds each collective that torch's FSDP2 starts, with the range that names its module."""
    ranges = [e for e in events if e["name"].startswith("FSDP::")]
    found = []
    for event in events:
        if event["name"] not in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            continue
        around = [e for e in ranges if e["ts"] <= event["ts"] < e["ts"] + e["dur"]]
        if around:  # the innermost names the module; one may be prefetched inside another's
            found.append((event, max(around, key=lambda e: (e["ts"], -e["dur"]))))
    return found


def memory_changes(events: Sequence[Event]) -> list[Event]:
    """Lists the events of memory in order, unseen releases included."""
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    unseen = _unseen_releases(changes, complete(events))
    return sorted([*unseen, *changes], key=lambda e: e["ts"])


def _unseen_releases(changes: Sequence[Event], events: Sequence[Event]) -> Iterator[Event]:
    """Makes an event for each release by gloo's threads, which have no profiler.

    Those are the last to release some buffers of FSDP2's collectives, and the copies that gloo
    makes of them. A reduce-scatter's are free at the end of its range, an all-gather's when its
    output is copied out; or, if that is earlier, when the address is given out again.
    """
    by_address: defaultdict[object, list[Event]] = defaultdict(list)
    for change in changes:
        by_address[change["args"]["Addr"]].append(change)
    stamps = [change["ts"] for change in changes]
    copied_out = [e for e in events if e["name"].startswith("FSDP::all_gather_copy_out")]
    for call, around in sharding(events):
        name = around["name"].replace("FSDP::all_gather", "FSDP::all_gather_copy_out")
        users = [e for e in copied_out if e["name"] == name and e["ts"] >= around["ts"]]
        user = min(users, key=lambda e: e["ts"], default=around)
        inside = slice(bisect_left(stamps, around["ts"]), bisect(stamps, call["ts"] + call["dur"]))
        for buffer in changes[inside]:
            args, later = buffer["args"], by_address[buffer["args"]["Addr"]]
            following = next((e for e in later if e["ts"] > buffer["ts"]), None)
            released = following is not None and following["args"]["Bytes"] < 0
            if args["Bytes"] > 0 and buffer["tid"] == call["tid"] and not released:
                end = user["ts"] + user["dur"]
                end = min(end, following["ts"]) if following else end
                yield {**buffer, "ts": end, "args": {**args, "Bytes": -args["Bytes"]}}


def op_bounds(events: Iterable[Event], begin: float) -> list[float]:
    """Bounds of each op of the pipeline on the host, in order, in seconds since `begin`."""
    ops = [e for e in events if e["name"].startswith(OP) and e["cat"] == "user_annotation"]
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in ops]
    return sorted(moment / 1e6 - begin for pair in ends for moment in pair)


def computing(events: list[Event]) -> list[Interval]:
    """Intervals in which this rank computes: its kernels, or on CPU its operators.

    On CPU an outermost operator that starts no communication counts as a whole. Another may wait
    inside, so only its nested `aten::` operators count.
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
    """Yields each outermost CPU operator of each thread, with all that ran inside it."""
    operators: list[tuple[Event, list[Event]]] = []
    for thread in _by_thread(events):
        end = -1.0
        for event in thread:
            if event["ts"] >= end:
                operators.append((event, []))
                end = event["ts"] + event["dur"]
            else:
                operators[-1][1].append(event)
    return operators


def kernels(events: list[Event]) -> list[KernelTime]:
    """Sums kernels by name, the longest first; on CPU operators, without those they call."""
    on_device = [(e["name"], e["dur"]) for e in events if e.get("cat") == "kernel"]
    timed = on_device or [pair for thread in _by_thread(events) for pair in _own_times(thread)]
    calls, seconds = Counter(name for name, _ in timed), summed((n, s / 1e6) for n, s in timed)
    times = [KernelTime(name, calls[name], seconds[name]) for name in calls]
    return sorted(times, key=lambda kernel: -kernel.seconds)


def _by_thread(events: list[Event]) -> list[list[Event]]:
    threads: dict[object, list[Event]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            threads.setdefault(event["tid"], []).append(event)
    return [sorted(thread, key=lambda e: (e["ts"], -e["dur"])) for thread in threads.values()]


def _own_times(thread: list[Event]) -> list[tuple[str, float]]:
    """(name, microseconds outside the operators it calls) of a thread's operators."""
    durations: list[float] = []
    open_now: list[tuple[int, float]] = []  # (index, end) of the operators around this one
    for index, event in enumerate(thread):
        while open_now and event["ts"] >= open_now[-1][1]:
            open_now.pop()
        durations.append(event["dur"])
        if open_now:
            durations[open_now[-1][0]] -= event["dur"]
        open_now.append((index, event["ts"] + event["dur"]))
    return [(event["name"], seconds) for event, seconds in zip(thread, durations, strict=True)]


def write_trace(target: str, trace: dict[str, Any], records: Sequence[RankRecord]) -> None:
    """Writes {"traceEvents": [...]}: the profiler's events and every pipeline rank's ops."""
    events = [part for event in trace["traceEvents"] for part in _apart(event)]
    events += op_events(trace, records)
    with aside(target) as path, path.open("w", encoding="utf-8") as file:
        json.dump({**trace, "traceEvents": events}, file)


def _apart(event: Event) -> list[Event]:
    """Returns the event, or a gloo event as the two ends of an asynchronous slice.

    A gloo event outlasts the operator that starts it, and slices of one thread have to nest.
    """
    if event.get("ph") != "X" or not event["name"].startswith("gloo:"):
        return [event]
    around = {key: value for key, value in event.items() if key != "dur"}
    around |= {"id": f"{event['tid']}:{event['ts']}", "cat": "gloo"}
    end = {"ph": "e", "ts": event["ts"] + event["dur"]}
    return [around | {"ph": "b"}, around | end]


def op_events(trace: dict[str, Any], records: Sequence[RankRecord]) -> list[Event]:
    """Makes the trace events of each pipeline rank: its ops, and the phases around them."""
    mark = next(e["ts"] for e in trace["traceEvents"] if e.get("name") == STEP)
    begin = next(r for r in records if r.rank == 0).profiled.step.phases.begin

    def named(kind: str, number: int, name: str) -> Event:
        return {"ph": "M", "name": kind, "pid": PROCESS, "tid": number, "args": {"name": name}}

    events = [named("process_name", 0, "mtcli: pipeline")]
    for record in speakers(records):
        step, tid = record.profiled.step, record.pp_rank
        events.append(named("thread_name", tid, f"pipeline rank {tid}"))
        phases = step.phases
        spans = [(str(span.op), span.start, span.end) for span in step.spans]
        spans.append(("reduce", phases.pipeline, phases.reduce))
        spans.append(("agree", phases.norm, phases.agree))
        spans.append(("optimizer", phases.agree, phases.end))
        common = {"ph": "X", "cat": "mtcli", "pid": PROCESS, "tid": tid}
        events += [
            {**common, "name": name, "ts": mark + (a - begin) * 1e6, "dur": (b - a) * 1e6}
            for name, a, b in spans
        ]
    return events
