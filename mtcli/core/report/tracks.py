"""The Chrome trace of a profile: rank 0's profiler events, and every pipeline rank's ops.

Opens in Perfetto and in chrome://tracing. Ops are those of the profiled step, on rank 0's clock,
laid over the profiler's own time by the annotation that both saw.
"""

import json
from collections.abc import Sequence
from typing import Any

from mtcli.core.report.attribution import speakers
from mtcli.core.report.records import RankRecord
from mtcli.core.report.trace import STEP
from mtcli.core.spec.outputs import aside

PROCESS = 10**9  # above any process id, so that our tracks have a process of their own


def write_trace(target: str, trace: dict[str, Any], records: Sequence[RankRecord]) -> None:
    """Writes {"traceEvents": [...]}: the profiler's events and a track per pipeline rank."""
    events = [part for event in trace["traceEvents"] for part in _apart(event)]
    events += op_events(trace, records)
    with aside(target) as path, path.open("w", encoding="utf-8") as file:
        json.dump({**trace, "traceEvents": events}, file)


def _apart(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The event; one of gloo's as the two ends of an asynchronous slice.

    It begins inside the operator that starts it and ends long after, and slices of one thread nest.
    """
    if event.get("ph") != "X" or not event["name"].startswith("gloo:"):
        return [event]
    around = {key: value for key, value in event.items() if key != "dur"}
    around |= {"id": f"{event['tid']}:{event['ts']}", "cat": "gloo"}
    end = {"ph": "e", "ts": event["ts"] + event["dur"]}
    return [around | {"ph": "b"}, around | end]


def op_events(trace: dict[str, Any], records: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """A named track per pipeline rank, with its ops and the phases around them."""
    mark = next(e["ts"] for e in trace["traceEvents"] if e.get("name") == STEP)
    begin = next(r for r in records if r.rank == 0).profiled.step.phases.begin
    events = [_named("process_name", 0, "mtcli: pipeline")]
    for record in speakers(records):
        step, track = record.profiled.step, record.pp_rank
        events.append(_named("thread_name", track, f"pipeline rank {track}"))
        phases = step.phases
        spans = [(str(span.op), span.start, span.end) for span in step.spans]
        spans.append(("reduce", phases.pipeline, phases.reduce))
        spans.append(("agree", phases.norm, phases.agree))
        spans.append(("optimizer", phases.agree, phases.end))
        events += [
            {
                "ph": "X",
                "cat": "mtcli",
                "name": name,
                "pid": PROCESS,
                "tid": track,
                "ts": mark + (start - begin) * 1e6,
                "dur": (end - start) * 1e6,
            }
            for name, start, end in spans
        ]
    return events


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": track, "args": {"name": name}}
