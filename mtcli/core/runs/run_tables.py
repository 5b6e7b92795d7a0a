"""Words runs as tables of (title, columns, rows): listed, plotted, compared. Imports no torch."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from mtcli.core.config.counts import duration
from mtcli.core.config.untrusted import shown
from mtcli.core.evaluate.compared_rows import COLUMNS, compared_rows
from mtcli.core.runs.disk_size import size_words
from mtcli.core.runs.loss_charts import count_words
from mtcli.core.runs.loss_curves import LossCurves, smoothed
from mtcli.core.runs.run_comparison import RunComparison
from mtcli.core.runs.run_pictures import RunTable, names_of
from mtcli.core.runs.run_summary import RunSummary
from mtcli.core.runs.sparkline import sparkline
from mtcli.core.sweep.record import AVERAGED, MEAN_LOSS
from mtcli.core.sweep.trials import short_names

LISTED = ("run", "state", "step", MEAN_LOSS, "valid", "tokens", "time", "size", "host", "differs")
LINE_WIDTH = 40  # characters of a curve
SHOWN_LETTERS = 40  # of the differing fields of a run


def sorted_runs(runs: Sequence[RunSummary], sort: str) -> list[RunSummary]:
    """Sorts runs: by the least `loss` or `valid` loss, the largest `size`, the `name`, or `recent`:
    running ones first, then the newest."""

    def key(run: RunSummary) -> Any:
        numbers = {"loss": run.loss, "valid": run.valid_loss, "size": -run.size_bytes}
        if sort == "recent":
            return run.state != "running", -run.changed_at
        return (numbers[sort] is None, numbers[sort] or 0.0) if sort in numbers else 0

    return sorted(sorted(runs, key=lambda run: str(run.folder)), key=key)


def listed_table(runs: Sequence[RunSummary], varied: Sequence[str]) -> RunTable:
    """Returns a row for each run, without columns that none has; `varied` are the fields in which
    their configs differ."""
    cells = [_listed(run, varied) for run in runs]
    used = [at for at in range(len(LISTED)) if any(row[at] for row in cells)]
    return "", [LISTED[at] for at in used], [[row[at] for at in used] for row in cells]


def _listed(run: RunSummary, varied: Sequence[str]) -> list[str]:
    return [
        str(run.folder),
        run.state,
        f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else ""),
        _number(run.loss, ".4f"),
        _number(run.valid_loss, ".4f"),
        _number(run.tokens, ",.0f"),
        "" if run.seconds is None else duration(run.seconds),
        size_words(run.size_bytes),
        run.host,
        _differing(run, varied),
    ]


def _differing(run: RunSummary, varied: Sequence[str]) -> str:
    """Words a run's values of the first fields in which runs differ, and counts the others."""
    names = short_names(varied)
    values = {name: run.value(name) for name in varied}
    words = [f"{names[name]}={shown(value)}" for name, value in values.items() if value is not None]
    lengths = accumulate(len(word) + 1 for word in words)
    count = max(1, sum(length <= SHOWN_LETTERS + 1 for length in lengths))
    more = f" and {len(words) - count} more" if len(words) > count else ""
    text = " ".join(words[:count])
    return (text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 3]}...") + more


def plotted_table(curves: Sequence[LossCurves], window: int) -> RunTable:
    """Returns a row for each run with its curve as text, up to its value after a tenth of the
    steps: the first steps would flatten all others."""
    rows = []
    for name, run in zip(names_of([run.folder for run in curves]), curves, strict=True):
        means = smoothed(run.losses, window)
        line = sparkline(means, LINE_WIDTH, means[len(means) // 10])
        rows.append([name, f"{run.steps[-1]:,.0f}", f"{means[0]:.4f} to {means[-1]:.4f}", line])
    return "", ["run", "step", "loss", ""], rows


def compared_tables(curves: Sequence[LossCurves], comparison: RunComparison) -> list[RunTable]:
    """Returns the tables of a comparison: figures, fields that differ, evaluations."""
    names = names_of([run.folder for run in curves])
    after = f"after {count_words(comparison.tokens)} tokens", f"after {comparison.seconds:.4g} s"
    figures = [
        [name, f"{f.tokens:,.0f}", duration(f.seconds)]
        + [_number(x, ".4f") for x in (f.loss, f.loss_at_tokens, f.loss_at_seconds, f.valid_loss)]
        for name, f in zip(names, comparison.figures, strict=True)
    ]
    columns = ["run", "tokens", "time", "at the end", *after, "least valid"]
    title = f"Losses, means of the last {AVERAGED} steps but for validation"
    tables: list[RunTable] = [(title, columns, figures)]
    fields = [
        [field, *("-" if value is None else shown(value) for value in values)]
        for field, values in comparison.fields.items()
    ]
    if fields:
        tables.append(("Fields of the configs that differ", ["field", *names], fields))
    for (file, a, b), report in comparison.evaluations.items():
        title = f"{file}: A is {names[a]}, B is {names[b]}"
        tables.append((title, list(COLUMNS), compared_rows(report)))
    return tables


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
