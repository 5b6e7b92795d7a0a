"""Compares runs: losses after the same tokens and the same time, configs, and evaluations."""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from math import fsum, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.untrusted import parse_json, read_untrusted
from mtcli.core.runs.loss_curves import LossCurves
from mtcli.core.runs.run_summary import RunSummary, varied_fields
from mtcli.core.sweep.record import AVERAGED
from mtcli.core.training.run_folder import FACTS

MAX_RESULT_BYTES = 1 << 26


class Figures(NamedTuple):
    """A run's figures in a comparison; losses are means of AVERAGED steps, None without any."""

    tokens: float
    seconds: float
    loss: float | None  # of the last steps
    loss_at_tokens: float | None  # after as many tokens as every run has read
    loss_at_seconds: float | None  # after as many seconds as every run has trained
    valid_loss: float | None  # the least


class RunComparison(NamedTuple):
    """Runs compared: what they share, their figures, and how their configs and evaluations differ.

    `evaluations` has, by (file, run, other run), the report of `mtcli eval --compare`.
    """

    tokens: float  # that every run has read
    seconds: float  # that every run has trained
    figures: list[Figures]
    fields: dict[str, list[Any]]  # of configs, a value for each run
    evaluations: dict[tuple[str, int, int], dict[str, Any]]

    def as_json(self, curves: Sequence[LossCurves]) -> dict[str, Any]:
        """Returns the comparison, with the runs' curves."""
        names = [str(run.folder) for run in curves]
        return {
            "runs": [
                figures._asdict() | {"curves": run.as_json(), "folder": name}
                for name, figures, run in zip(names, self.figures, curves, strict=True)
            ],
            "common": {"tokens": self.tokens, "seconds": self.seconds},
            "fields": self.fields,
            "evaluations": [
                {"file": file, "a": names[a], "b": names[b], "tasks": report["tasks"]}
                for (file, a, b), report in self.evaluations.items()
            ],
        }


def compare_runs(curves: Sequence[LossCurves], runs: Sequence[RunSummary]) -> RunComparison:
    """Compares runs by their curves and summaries. Raises MtcliError for evaluations that do not
    fit together."""
    tokens = min(run.tokens[-1] for run in curves)
    seconds = min(run.seconds[-1] for run in curves)
    figures = [
        Figures(
            run.tokens[-1],
            run.seconds[-1],
            _loss(run, len(run.losses)),
            _loss(run, bisect_right(run.tokens, tokens)),
            _loss(run, bisect_right(run.seconds, seconds)),
            min(run.valid.values(), default=None),
        )
        for run in curves
    ]
    fields = {field: [run.value(field) for run in runs] for field in varied_fields(runs)}
    return RunComparison(tokens, seconds, figures, fields, _evaluations([c.folder for c in curves]))


def _loss(run: LossCurves, end: int) -> float | None:
    """Returns the mean loss of the AVERAGED steps before an index."""
    losses = [loss for loss in run.losses[max(0, end - AVERAGED) : end] if isfinite(loss)]
    return fsum(losses) / len(losses) if losses else None


def _evaluations(folders: Sequence[Path]) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Compares results of `mtcli eval --json` that have one name in two runs' folders."""
    from mtcli.core.evaluate.comparison import compare_files  # loads numpy

    names = [_results(folder) for folder in folders]
    return {
        (name, a, b): compare_files(str(folders[a] / name), str(folders[b] / name))
        for a, b in combinations(range(len(folders)), 2)
        for name in names[a]
        if name in names[b]
    }


def _results(folder: Path) -> list[str]:
    """Lists the results of evaluations in a run's folder, by name."""
    names = []
    for path in sorted(folder.glob("*.json")):
        if path.name == FACTS:
            continue
        with suppress(OSError, ValueError):
            table = parse_json(read_untrusted(path, MAX_RESULT_BYTES))
            if isinstance(table, dict) and {"tasks", "items", "checkpoint"} <= table.keys():
                names.append(path.name)
    return names
