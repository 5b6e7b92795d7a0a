"""Where a step's time goes on a GPU: its longest operations, and what the GPU was idle before.

    python benchmarks/gpu/profile_step.py                       # the cases of CASES, a record each
    python benchmarks/gpu/profile_step.py --only gpt2-124m --set train.compile=true
    python benchmarks/gpu/profile_step.py --device cpu --tiny --output FOLDER   # rehearsed

`mtcli profile` runs the steps and writes a trace. Kernels count for the operation that launched
them, and its bytes are those that trace_step.py counts: so a row has bytes over time, as a part of
a copy's. On a CPU an operation's own time takes the place of its kernels'.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import CASES
from ceilings import ceilings
from record import RESULTS, Row, open_record
from trace_step import step_events

from mtcli.core.config.loading import dump_toml
from mtcli.core.config.schema import RunConfig
from mtcli.core.runtime.console import print_table

PROFILED = ("gpt2-124m", "llama-8b/2", "mixtral-8x7b/1")
STEPS, WARMUP = 3, 3
SHOWN, IDLE_US = 25, 20.0  # operations, and the shortest gap that is listed


class Span(NamedTuple):
    """An operation on the device, in microseconds of the trace."""

    name: str
    begin: float
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(PROFILED))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds of a case")
    args = parser.parse_args()
    limits = ceilings(torch.device(args.device))
    record = open_record(args.output, "profile", limits["device"], afresh=True)
    record.facts |= limits
    for name in args.only:
        row = {"case": name, "settings": args.set} | profiled(name, args, limits)
        show(row)
        record.add(row)
    print(f"wrote {record.path}")


def profiled(name: str, args: Namespace, limits: Row) -> Row:
    """The longest operations of a case, and the gaps between them."""
    config = CASES[name].config(args.set, args.tiny)
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"device": args.device})}
    )
    with tempfile.TemporaryDirectory() as folder:
        file, trace, found = (Path(folder) / name for name in ("run.toml", "trace.json", "p.json"))
        file.write_text(dump_toml(config))
        words = ["--steps", STEPS, "--warmup", WARMUP, "--trace", trace, "--json", found]
        command = [sys.executable, "-m", "mtcli", "profile", file, "--no-calibrate", *words]
        subprocess.run(
            [str(word) for word in command], check=True, stdout=subprocess.DEVNULL,
            timeout=args.budget,
        )  # fmt: skip
        spans, whole = device_spans(json.loads(trace.read_text())["traceEvents"])
        seconds = json.loads(found.read_text())["step_seconds"]["median"]
    return {
        "step_s": seconds,
        "trace_us": whole,
        "operations": operations(spans, moved(config), limits["copy_bytes_per_s"])[:SHOWN],
        "idle": gaps(spans),
    }


def device_spans(events: Iterable[dict[str, Any]]) -> tuple[list[Span], float]:
    """Kernels by the operation that launched them, in order, and the microseconds of all; of a
    trace without kernels, the operations' own time."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_host = [event for event in timed if event.get("cat") == "cpu_op"]
    kernels = [event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy")]
    launcher = {event["args"].get("External id"): event["name"] for event in on_host}
    if kernels:
        spans = [
            Span(launcher.get(e["args"].get("External id"), e["name"]), e["ts"], e["ts"] + e["dur"])
            for e in kernels
        ]
    else:
        spans = exclusive(on_host)
    spans.sort(key=lambda span: span.begin)
    return spans, max(span.end for span in spans) - spans[0].begin


def exclusive(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The time of operations without that of the operations that they call."""
    bounds = defaultdict(list)  # by thread: (time, 1 where an operation begins, its end, its name)
    for event in events:
        begin, end = event["ts"], event["ts"] + event["dur"]
        bounds[event.get("tid")] += [(begin, 1, -end, event["name"]), (end, 0, 0.0, "")]
    spans = []
    for of_thread in bounds.values():
        calls: list[str] = []
        last = 0.0
        for at, begins, _, name in sorted(of_thread):
            if calls and at > last:
                spans.append(Span(calls[-1], last, at))
            last = at
            if begins:
                calls.append(name)
            else:
                calls.pop()
    return spans


def operations(spans: Sequence[Span], bytes_of: dict[str, float], copy: float) -> list[Row]:
    """A row for each operation, the longest first; `copy` are bytes per second."""
    times: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        times[span.name].append(span.end - span.begin)
    rows = []
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        seconds = sum(each) / 1e6
        rate = bytes_of.get(name, 0.0) / seconds
        row = {"name": name, "kernels": len(each), "ms": seconds * 1e3}
        rows.append(row | {"of_copy": rate / copy if rate else None})
    return rows


def gaps(spans: Sequence[Span]) -> Row:
    """The time in which nothing ran, and the operations that came after it, by their sum."""
    after: dict[str, float] = defaultdict(float)
    end = spans[0].end
    for span in spans[1:]:
        if span.begin - end > IDLE_US:
            after[span.name] += span.begin - end
        end = max(end, span.end)
    ordered = dict(sorted(after.items(), key=lambda item: -item[1])[:SHOWN])
    return {"us": sum(after.values()), "before": ordered}


def moved(config: RunConfig) -> dict[str, float]:
    """Bytes that an operation reads and writes in the step that is traced, by its name there."""
    train = config.train.model_copy(update={"device": "cuda"})
    found: dict[str, float] = defaultdict(float)
    for event in step_events(config.model_copy(update={"train": train}), 1, 0):
        found[event.name.replace(".", "::", 1).partition(".")[0]] += (
            event.read_bytes + event.written_bytes
        )
    return found


def show(row: Row) -> None:
    """Prints the operations of a case, and where its device was idle."""
    title = f"{row['case']}: {row['step_s']:.4f} s a step, {row['trace_us'] / 1e3:.1f} ms traced"
    cells = [
        [
            one["name"],
            str(one["kernels"]),
            f"{one['ms']:.2f}",
            f"{one['ms'] * 1e3 / row['trace_us']:.1%}",
            f"{one['of_copy']:.2f}" if one["of_copy"] else "",
        ]
        for one in row["operations"]
    ]
    print_table(title, ("operation", "kernels", "ms", "share", "of a copy"), cells, right=True)
    idle = row["idle"]
    print(f"  idle {idle['us'] / row['trace_us']:.1%} in gaps above {IDLE_US:.0f} us, before:")
    for name, us in idle["before"].items():
        print(f"    {name}: {us / 1e3:.2f} ms")


if __name__ == "__main__":
    main()
