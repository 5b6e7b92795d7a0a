"""Says whether a run is under way, and how it ended. Imports no torch.

A lock says who trains in a folder. Of a holder on this machine it is known whether it lives. One on
another machine counts as alive while the run's files change.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mtcli.core.checkpoint.folder import CHECKPOINTS, step_folders, step_of
from mtcli.core.runs.records_tail import last_records
from mtcli.core.training.run_folder import EVENTS, METRICS
from mtcli.core.training.run_lock import LOCK, lock_holder

State = Literal["running", "finished", "stopped", "failed", "dead lock"]
SILENT_SECONDS = 600.0  # without a change, after which a run of another machine counts as dead
SILENT_STEPS = 20  # that long at least


class Condition(NamedTuple):
    """A run's state, the reason where there is one, and the host of the lock's holder."""

    state: State
    reason: str = ""
    host: str = ""


class Progress(NamedTuple):
    """The step that a run has come to, of how many, and the seconds of one; None: not known."""

    step: int
    steps: int | None
    step_seconds: float | None


def condition_of(
    folder: Path, progress: Progress, now: float, trial: Mapping[str, Any]
) -> Condition:
    """Returns the condition of a run at a time (Unix seconds); `trial` is its entry in sweep.json,
    {} where it is in none."""
    if (locked := lock_holder(folder)) is not None:
        holder, lives = locked
        host, silence = holder.host if holder else "", now - changed_at(folder)
        patience = max(SILENT_SECONDS, SILENT_STEPS * (progress.step_seconds or 0.0))
        if lives or (lives is None and silence < patience):
            return Condition("running", host=host)
        who = str(holder) if holder else "a process that it does not name"
        is_silent = f"no file has changed for {silence:,.0f} s"
        why = "has died" if lives is False else is_silent
        return Condition("dead lock", f"{LOCK} names {who}: {why}", host)
    return _ended(folder, progress, trial)


def changed_at(folder: Path) -> float:
    """Returns when a run last wrote something, in Unix seconds by the file system's clock."""
    names = (METRICS, EVENTS, LOCK, CHECKPOINTS)
    times = []
    for name in names:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def _ended(folder: Path, progress: Progress, trial: Mapping[str, Any]) -> Condition:
    """Returns how a run that nobody holds has ended: as it says, or by what it has saved."""
    events = last_records(folder / EVENTS)
    if events and events[-1].get("event") == "failed":
        return Condition("failed", str(events[-1].get("reason", "")))
    for event in events:
        if event.get("event") == "stopped_early" and event["step"] >= progress.step:
            return Condition("finished", f"stopped early: {event.get('reason', '')}")
    if trial.get("status") == "diverged":
        return Condition("failed", str(trial.get("reason", "")))
    if progress.steps is not None and progress.step >= progress.steps:
        return Condition("finished")
    saved = step_folders(folder / CHECKPOINTS)
    newest = step_of(saved[-1]) if saved else 0
    if newest and newest >= progress.step:
        return Condition("stopped", str(trial.get("reason", "")))
    return Condition("failed", f"it ended at step {progress.step:,} and saved step {newest:,} last")
