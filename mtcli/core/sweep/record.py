"""Records a sweep's trials, and writes `sweep.json`. Imports no torch."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mtcli.core.checkpoint.folder import CHECKPOINTS, step_folders, step_of
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import is_number, listed, load_json
from mtcli.core.runtime.atomic_writes import write_text
from mtcli.core.runtime.json_text import json_text
from mtcli.core.sweep.trials import Trial
from mtcli.core.training.run_folder import METRICS, holds_run, step_records

NAME = "sweep.json"
AVERAGED = 10  # last steps over which the loss that sorts trials is a mean
MEAN_LOSS = f"loss, last {AVERAGED}"  # the column of such losses in tables

Status = Literal["waiting", "running", "finished", "stopped", "diverged"]


class TrialRecord:
    """A trial, its losses by step, and how it ended."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.losses: list[float] = []  # of steps 1, 2, ...; NaN where there was none
        self.valid_loss: float | None = None
        self.status: Status = "waiting"
        self.reason = ""  # why it was stopped or diverged
        self.lr = 0.0  # of the last step

    @property
    def name(self) -> str:
        """The trial's name."""
        return self.trial.name

    @property
    def ended(self) -> bool:
        """Whether the trial trains no further."""
        return self.status in ("finished", "stopped", "diverged")

    @property
    def loss(self) -> float:
        """The mean loss of the last steps; infinite where there is none."""
        last = self.losses[-AVERAGED:]
        mean = math.fsum(last) / len(last) if last else math.inf
        return mean if math.isfinite(mean) else math.inf

    @property
    def order(self) -> tuple[int, int, float, str]:
        """Sorts finished trials by score, then trials stopped early by their length, as losses of
        fewer steps compare with none, then diverged ones."""
        group = {"stopped": 1, "diverged": 2}.get(self.status, 0)
        steps = len(self.losses) if self.status == "stopped" else 0
        return group, -steps, self.score, self.name

    @property
    def score(self) -> float:
        """The number that trials are compared by: the validation loss where there is one, else the
        loss."""
        return self.loss if self.valid_loss is None else self.valid_loss

    def end(self, status: Status, reason: str = "") -> None:
        """Records how the trial ended."""
        self.status, self.reason = status, reason

    def read_losses(self, step: int) -> None:
        """Reads the losses of steps 1 .. step from the run folder."""
        path = Path(self.trial.config.train.output) / METRICS
        records = step_records(path) if path.is_file() else ()
        rows = {row["step"]: row for _, row in records}
        self.losses = []
        for number in range(1, step + 1):
            loss, valid = (rows.get(number, {}).get(key) for key in ("loss", "valid_loss"))
            self.losses.append(float(loss) if is_number(loss) else math.nan)
            self.valid_loss = float(valid) if is_number(valid) else self.valid_loss

    def as_json(self) -> dict[str, Any]:
        """The trial as sweep.json has it."""
        return {
            "name": self.name,
            "folder": self.trial.config.train.output,
            "values": dict(self.trial.values),
            "status": self.status,
            "stopped_early": self.status == "stopped",
            "reason": self.reason,
            "steps": len(self.losses),
            "loss": self.loss,
            "last_loss": self.losses[-1] if self.losses else None,
            "valid_loss": self.valid_loss,
        }


class ArrayRecord(NamedTuple):
    """An array that was trained: its models, steps, seconds and tokens per second of all."""

    models: list[str]
    first_step: int
    last_step: int
    seconds: float  # of its steps
    tokens_per_second: float
    state_bytes: int


def saved_step(trial: Trial) -> int:
    """The step of a trial's newest checkpoint; 0 where it has none."""
    folders = step_folders(Path(trial.config.train.output) / CHECKPOINTS)
    return step_of(folders[-1]) if folders else 0


def restored(trials: Sequence[Trial], output: Path, keeps_stopped: bool) -> list[TrialRecord]:
    """Restores the records of trials from the run folders and sweep.json of an earlier start.

    Unless `keeps_stopped`, a rule decides again on the trials that it stopped, from the same
    losses. So it does where a stopped trial's last save failed.
    """
    rows = saved_trials(output)
    records = [TrialRecord(trial) for trial in trials]
    for record in records:
        row, step = rows.get(record.name, {}), saved_step(record.trial)
        record.read_losses(step)
        recorded_steps = row.get("steps")
        steps = recorded_steps if type(recorded_steps) is int else step
        if step >= record.trial.config.train.steps:
            record.end("finished")
        elif row.get("status") == "diverged":
            record.read_losses(min(steps, record.trial.config.train.steps))
            record.end("diverged", str(row.get("reason", "")))
        elif keeps_stopped and row.get("status") == "stopped" and step >= steps:
            record.end("stopped", str(row.get("reason", "")))
    return records


def require_startable(trials: Sequence[Trial], output: Path, resume: bool) -> None:
    """Raises MtcliError where the folder does not fit --resume.

    Without it, no sweep and no run folder of a trial may be there; with it, the earlier sweep may
    have no trial that is not among these.
    """
    if resume:
        rows, names = saved_trials(output), {trial.name for trial in trials}
        gone = [name for name, row in rows.items() if row.get("steps") and name not in names]
        if gone:
            message = f"{len(gone)} of the {len(rows)} trials in {output / NAME} are not among the "
            message += f"{len(trials)} that are asked for: {listed(gone)}"
            hint = "give all of --vary, --random and --seeds again; or name another folder"
            raise wrong(message, hint, "--resume")
        return
    begun = [trial.name for trial in trials if holds_run(Path(trial.config.train.output))]
    if begun:
        message = f"{len(begun)} of {len(trials)} trials have run folders in {output}: "
        hint = "--resume goes on with them; or name another folder"
        raise wrong(message + listed(begun), hint, "--output")
    if (output / NAME).exists():
        message = f"{output} has the {NAME} of another sweep"
        raise wrong(message, "--resume takes its folder; or name another", "--output")


def saved_trials(output: Path) -> dict[str, dict[str, Any]]:
    """Reads the trials of sweep.json by name; {} where there is no such file.

    Raises MtcliError where it is damaged.
    """
    path = output / NAME
    if not path.exists():
        return {}
    hint = "remove it: --resume goes on from the trials' run folders"
    table = load_json(path, hint, "check its permissions")
    try:
        return {str(row["name"]): dict(row) for row in table["trials"]}
    except (KeyError, TypeError, ValueError):
        raise wrong(f"{path} has no trials", hint) from None


def write(output: Path, facts: dict[str, Any], records: Sequence[TrialRecord]) -> dict[str, Any]:
    """Writes sweep.json, the best trial first, and returns its content."""
    rows = [record.as_json() for record in sorted(records, key=lambda r: r.order)]
    table = facts | {"trials": rows}
    write_text(output / NAME, json_text(table))
    return table
