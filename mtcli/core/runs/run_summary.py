"""Sums up runs for a table, from the ends of their files. Imports no torch."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import fsum
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mtcli.core.checkpoint.folder import CONFIG
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.origins import entries, own_default
from mtcli.core.config.untrusted import MAX_TOML_BYTES, parse_json, parse_toml, read_untrusted
from mtcli.core.runs.condition import Progress, State, changed_at, condition_of
from mtcli.core.runs.disk_size import size_of
from mtcli.core.runs.records_tail import Record, last_records, last_with, number
from mtcli.core.sweep.record import AVERAGED, saved_trials
from mtcli.core.training.run_folder import FACTS, METRICS

MAX_FACTS_BYTES = 1 << 20
# Fields that say where a run is, and not what it is.
OF_PLACES = ("train.output", "train.tracker_name")


class RunSummary(NamedTuple):
    """A run as the table shows it; None where its folder does not say."""

    folder: Path
    state: State
    reason: str
    step: int
    steps: int | None
    loss: float | None  # mean of the last AVERAGED steps
    last_loss: float | None
    valid_loss: float | None
    tokens: float | None
    seconds: float | None  # of its steps
    step_seconds: float | None  # median of the last steps
    size_bytes: int
    host: str
    changed_at: float  # Unix seconds
    fields: Mapping[str, Any]  # of its config, by name

    def value(self, field: str) -> Any:
        """Returns the value of a config's field; its default where the config is of a version
        before the field, and None where there is no config."""
        return self.fields.get(field, own_default(field)) if self.fields else None

    def as_json(self) -> dict[str, Any]:
        """Returns the figures by name, without the config."""
        return self._asdict() | {"folder": str(self.folder)} | {"fields": None}


def summaries(folders: Iterable[Path], now: float | None = None) -> list[RunSummary]:
    """Sums up runs at a time (Unix seconds), by default this moment."""
    moment = time.time() if now is None else now
    trials: dict[Path, dict[str, Any]] = {}
    found = []
    for folder in folders:
        if folder.parent not in trials:
            trials[folder.parent] = _trials(folder.parent)
        found.append(_summary(folder, moment, trials[folder.parent].get(folder.name, {})))
    return found


def varied_fields(runs: Sequence[RunSummary]) -> list[str]:
    """Lists the fields in which the configs of runs differ, in the config's order."""
    known_runs = [run for run in runs if run.fields]
    fields = dict.fromkeys(field for run in known_runs for field in run.fields)

    def is_varied(field: str) -> bool:
        # As JSON a tuple of defaults is the list of a file.
        return len({json.dumps(run.value(field), default=str) for run in known_runs}) > 1

    return [field for field in fields if field not in OF_PLACES and is_varied(field)]


def fields_of(folder: Path) -> dict[str, Any]:
    """Reads a run's config as values by field; {} where it cannot be read."""
    with suppress(OSError, ValueError):
        text = read_untrusted(folder / CONFIG, MAX_TOML_BYTES).decode()
        return dict(entries(parse_toml(text)))
    return {}


def _summary(folder: Path, now: float, trial: Mapping[str, Any]) -> RunSummary:
    fields, rows = fields_of(folder), last_records(folder / METRICS)
    row = rows[-1] if rows else None
    steps = fields.get("train.steps")
    seconds = list(_numbers(rows, "step_seconds"))
    pace = median(seconds) if seconds else None
    progress = Progress(row["step"] if row else 0, steps if type(steps) is int else None, pace)
    condition = condition_of(folder, progress, now, trial)
    losses = list(_numbers(rows[-AVERAGED:], "loss"))
    return RunSummary(
        folder,
        condition.state,
        condition.reason,
        progress.step,
        progress.steps,
        fsum(losses) / len(losses) if losses else None,
        number(row, "loss"),
        number(last_with(folder / METRICS, "valid_loss"), "valid_loss"),
        number(row, "total_tokens"),
        number(row, "total_seconds"),
        pace,
        size_of(folder),
        condition.host or _host(folder),
        changed_at(folder),
        fields,
    )


def _numbers(rows: Iterable[Record], key: str) -> Iterator[float]:
    for row in rows:
        if (value := number(row, key)) is not None:
            yield value


def _trials(folder: Path) -> dict[str, Any]:
    """Reads the trials of a sweep's folder by name; {} where it is none, or damaged."""
    try:
        return dict(saved_trials(folder))
    except MtcliError:
        return {}


def _host(folder: Path) -> str:
    """Reads the machine on which a run's first rank was last."""
    with suppress(OSError, ValueError):
        facts = parse_json(read_untrusted(folder / FACTS, MAX_FACTS_BYTES))
        host = facts.get("host") if isinstance(facts, dict) else None
        return host if isinstance(host, str) else ""
    return ""
