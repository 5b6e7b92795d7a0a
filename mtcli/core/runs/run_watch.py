"""Follows a run by the ends of its files, also one of another machine. Imports no torch."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.counts import duration
from mtcli.core.runs.condition import changed_at
from mtcli.core.runs.disk_size import size_words
from mtcli.core.runs.records_tail import Record, last_records, number
from mtcli.core.runs.run_summary import RunSummary, summaries
from mtcli.core.runs.sparkline import sparkline
from mtcli.core.training.run_folder import EVENTS, METRICS

SHOWN_EVENTS = 4
MOST_WIDTH = 60  # characters of the curve


class Glance(NamedTuple):
    """A run at a moment: its summary, its last rows and events, and seconds since it wrote."""

    run: RunSummary
    rows: Sequence[Record]
    events: Sequence[Record]
    silent_seconds: float

    @property
    def left_seconds(self) -> float | None:
        """The seconds of the steps that are left, at the pace of the last ones."""
        if self.run.steps is None or self.run.step_seconds is None:
            return None
        return max(0, self.run.steps - self.run.step) * self.run.step_seconds

    def figures(self) -> dict[str, Any]:
        """Returns the figures by name."""
        row = self.rows[-1] if self.rows else None
        return {
            "folder": str(self.run.folder),
            "state": self.run.state,
            "reason": self.run.reason,
            "host": self.run.host,
            "step": self.run.step,
            "steps": self.run.steps,
            "loss": number(row, "loss"),
            "valid_loss": self.run.valid_loss,
            "tokens_per_second": number(row, "tokens_per_second"),
            "step_seconds": self.run.step_seconds,
            "memory_bytes": number(row, "memory_bytes"),
            "left_seconds": self.left_seconds,
            "silent_seconds": self.silent_seconds,
            "events": list(self.events),
        }


class RunWatcher:
    """Looks at a run again and again. Once it has changed meanwhile, how long it has been silent is
    by this machine's clock, and no longer by that of the file system."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.clock, self.ticks = folder, clock, ticks
        self.changed = changed_at(folder)
        self.changed_tick: float | None = None  # when it was last found to have changed

    def look(self) -> Glance:
        """Reads the run as it is now."""
        changed = changed_at(self.folder)
        if changed != self.changed:
            self.changed, self.changed_tick = changed, self.ticks()
        silent = self.clock() - changed
        if self.changed_tick is not None:
            silent = self.ticks() - self.changed_tick
        (run,) = summaries([self.folder], now=changed + silent)
        rows = last_records(self.folder / METRICS)
        events = last_records(self.folder / EVENTS)[-SHOWN_EVENTS:]
        return Glance(run, rows, events, max(0.0, silent))


def panel(glance: Glance, width: int) -> str:
    """Words a glance as lines of a name and a value."""
    run, figures = glance.run, glance.figures()
    losses = [number(row, "loss") for row in glance.rows]
    curve = [float("nan") if loss is None else loss for loss in losses]
    lines = {"run": f"{run.folder}, {run.state}" + f" on {run.host}" * bool(run.host)}
    lines["why"] = run.reason
    of_steps = f" of {run.steps:,} ({run.step / run.steps:.1%})" if run.steps else ""
    lines["step"] = f"{run.step:,}{of_steps}"
    lines["loss"] = _words(figures["loss"], ".4f")
    lines[""] = sparkline(curve, min(MOST_WIDTH, width - 9)) if len(curve) > 1 else ""
    lines["valid"] = _words(run.valid_loss, ".4f")
    pace = _words(run.step_seconds, ".4g")
    speed = _words(figures["tokens_per_second"], ",.0f")
    lines["speed"] = f"{speed} tokens/s, {pace} s a step" if speed and pace else ""
    lines["tokens"] = _words(run.tokens, ",.0f")
    lines["left"] = _duration(glance.left_seconds) if run.state == "running" else ""
    memory = figures["memory_bytes"]
    lines["memory"] = "" if memory is None else f"{size_words(memory)} at most, of the first rank"
    lines["wrote"] = f"{_duration(glance.silent_seconds)} ago"
    shown = [f"{name:<9}{text}"[:width] for name, text in lines.items() if text]
    return "\n".join([*shown, *(f"- {text}"[:width] for text in event_words(glance.events))])


def line(glance: Glance) -> str:
    """Words a glance as names and values in one line, as a run's own log does."""
    figures = glance.figures()
    words = [f"step {glance.run.step}" + f"/{glance.run.steps}" * bool(glance.run.steps)]
    for name, value, form in (
        ("loss", figures["loss"], ".4f"),
        ("valid", figures["valid_loss"], ".4f"),
        ("tokens/s", figures["tokens_per_second"], ".0f"),
    ):
        words += [f"{name} {value:{form}}"] if value is not None else []
    if (memory := figures["memory_bytes"]) is not None:
        words.append(f"memory_gib {memory / 2**30:.2f}")
    if glance.run.state == "running":
        words += [f"left {left}"] if (left := _duration(glance.left_seconds)) else []
    else:
        words.append(glance.run.state + f": {glance.run.reason}" * bool(glance.run.reason))
    return " ".join(words)


def event_words(events: Sequence[Record]) -> Iterator[str]:
    """Words what happened besides steps."""
    for event in events:
        kind, step = str(event.get("event")), f"{event['step']:,}"
        size = number(event, "bytes")
        said = {
            "saved": f"saved step {step}" + (f", {size_words(size)}" if size else ""),
            "save_failed": f"the save of step {step} failed: {event.get('reason')}",
            "stopped_early": f"stopped early at step {step}: {event.get('reason')}",
            "resumed": f"resumed at step {step}",
            "failed": f"failed after step {step}: {event.get('reason')}",
        }
        yield said.get(kind, f"{kind} at step {step}")


def _words(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
