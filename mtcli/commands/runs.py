"""`mtcli runs`: which runs are there, how do they differ, and what space can be freed?"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtcli.commands.options import JsonOut, refuse_flags
from mtcli.commands.output import answer, answering, echo, say_wrote
from mtcli.core.config.errors import Exit, wrong

if TYPE_CHECKING:
    from mtcli.core.runs.loss_curves import LossCurves
    from mtcli.core.runs.run_comparison import Comparison
    from mtcli.core.runs.run_summary import RunSummary

FOLDER = "runs"  # where train.output is by default
# What each action takes, the fewest and the most of them, and its flags.
MANY = 10_000
ACTIONS: dict[str, tuple[str, int, int]] = {
    "list": ("[FOLDER]", 0, 1),
    "plot": ("RUN ...", 1, MANY),
    "compare": ("A B ...", 1, MANY),
    "watch": ("RUN", 1, 1),
}
FLAGS = {
    "sort": ("list",),
    "axis": ("plot",),
    "smooth": ("plot", "compare"),
    "output": ("plot", "compare"),
    "once": ("watch",),
    "every": ("watch",),
}
Tables = Sequence[tuple[str, list[str], list[list[str]]]]  # title, columns, rows
LINE_WIDTH = 40  # characters of a curve in the table
SHOWN_FIELDS = 6  # of the differing ones of a run in the table
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FOLDER | plot RUN .. | compare A B .. | watch RUN]",
        help=f"FOLDER of runs to list [{FOLDER}]; RUN, A, B: a run folder, or one of runs",
    ),
]
Sort = Annotated[
    Literal["recent", "loss", "valid", "size", "name"],
    typer.Option("--sort", help="order of the table; recent has running ones first"),
]
Axis = Annotated[
    Literal["tokens", "steps", "time"], typer.Option("--axis", help="what plot draws losses over")
]
Smooth = Annotated[
    int,
    typer.Option(
        min=0, max=10**6, help="steps in each mean; 1 draws every step; 0: a 50th of the run"
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output", metavar="FILE", help="write a picture: .png, .svg or .pdf, or a page: .html"
    ),
]
Once = Annotated[bool, typer.Option("--once", help="watch: show the run once, and end")]
Every = Annotated[
    float, typer.Option(min=0.1, max=3600, help="watch: seconds between two looks at the run")
]


@answering
def runs(
    context: typer.Context,
    words: Words = None,
    sort: Sort = "recent",
    axis: Axis = "tokens",
    smooth: Smooth = 0,
    output: Output = None,
    every: Every = 2.0,
    once: Once = False,
    json_out: JsonOut = None,
) -> None:
    """List runs: state, step, loss, tokens, time, size, what differs; plot, compare, watch them.

    plot draws losses over tokens, steps or time. compare draws them over tokens and time, lists the
    fields in which configs differ, and compares evaluations of one name in both run folders. watch
    shows a run until it ends, also one of another machine, or until q.
    """
    action, names = _action(words or [])
    for flag, actions in FLAGS.items():
        if action not in actions:
            refuse_flags(context, (flag,), f"goes with {' and '.join(actions)}")
    if action == "list":
        return _list(names[0] if names else FOLDER, sort, json_out)
    if action == "watch":
        return _watch(names[0], every, once, json_out)
    _require_output(output)
    if action == "plot":
        _plot(names, axis, smooth, output, json_out)
    else:
        _compare(names, smooth, output, json_out)


def _action(words: list[str]) -> tuple[str, list[str]]:
    """Returns (action, its names); the first word is an action, or a folder to list."""
    action, names = (words[0], words[1:]) if words and words[0] in ACTIONS else ("list", words)
    usage, fewest, most = ACTIONS[action]
    if not fewest <= len(names) <= most:
        said = f"{action} takes {usage or 'no name'}, and {len(names)} names are given"
        line = f"mtcli runs {'' if action == 'list' else action + ' '}{usage}"
        raise wrong(said, line)
    return action, names


def _list(folder: str, sort: str, json_out: str | None) -> None:
    from mtcli.core.runs.run_search import find_runs
    from mtcli.core.runs.run_summary import summaries, varied_fields
    from mtcli.core.runtime.console import print_line, print_table

    found = _sorted(summaries(find_runs(Path(folder))), sort)
    varied = varied_fields(found)
    rows = [run.as_json() | {"fields": {f: run.fields.get(f) for f in varied}} for run in found]
    if not answer({"folder": folder, "varied": varied, "runs": rows}, json_out):
        return
    if not found:
        return echo(f"{folder} holds no run")
    columns = ["run", "state", "step", "loss", "valid", "tokens", "time", "size", "host", "differs"]
    cells = [_row(run, varied) for run in found]
    used = [at for at, name in enumerate(columns) if any(row[at] for row in cells)]
    print_table("", [columns[at] for at in used], [[row[at] for at in used] for row in cells])
    for run in found:
        if run.reason:
            print_line(f"{run.folder}: {run.state}: {run.reason}", indent="  ")


def _sorted(found: "list[RunSummary]", sort: str) -> "list[RunSummary]":
    """Sorts runs: the least loss, the largest, or the running and newest first."""

    def key(run: "RunSummary") -> Any:
        numbers = {"loss": run.loss, "valid": run.valid_loss, "size": -run.size_bytes}
        if sort == "recent":
            return run.state != "running", -run.changed_at
        return (numbers[sort] is None, numbers[sort] or 0.0) if sort in numbers else 0

    return sorted(sorted(found, key=lambda run: str(run.folder)), key=key)


def _row(run: "RunSummary", varied: list[str]) -> list[str]:
    from mtcli.core.runs.disk_size import size_words

    return [
        str(run.folder),
        run.state,
        f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else ""),
        _number(run.loss, ".4f"),
        _number(run.valid_loss, ".4f"),
        _number(run.tokens, ",.0f"),
        "" if run.seconds is None else str(timedelta(seconds=round(run.seconds))),
        size_words(run.size_bytes),
        run.host,
        _differing(run, varied),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _differing(run: "RunSummary", varied: list[str]) -> str:
    """Words a run's values of the fields in which runs differ, the first few of them."""
    from mtcli.core.config.untrusted import shown
    from mtcli.core.sweep.trials import short_names

    names = short_names(varied)
    words = [
        f"{names[field]}={shown(run.fields[field])}" for field in varied if field in run.fields
    ]
    more = f" and {len(words) - SHOWN_FIELDS} more" if len(words) > SHOWN_FIELDS else ""
    return " ".join(words[:SHOWN_FIELDS]) + more


def _require_output(output: str | None) -> None:
    from mtcli.core.runtime.outputs import require_extra, require_writable

    if output:
        require_writable(output, "--output", (".png", ".svg", ".pdf", ".html"))
        require_extra("matplotlib", "--output")


def _plot(
    names: list[str], axis: str, smooth: int, output: str | None, json_out: str | None
) -> None:
    from mtcli.core.runs.loss_curves import read_curves, smoothed
    from mtcli.core.runs.run_pictures import names_of
    from mtcli.core.runs.run_search import find_all_runs
    from mtcli.core.runtime.console import print_table

    curves = read_curves(find_all_runs(names))
    data = {"runs": [run.as_json() for run in curves]}
    if answer(data, json_out):
        rows = []
        for name, run in zip(names_of([run.folder for run in curves]), curves, strict=True):
            means = smoothed(run.losses, smooth)
            ends = f"{means[0]:.4f} to {means[-1]:.4f}"
            rows.append([name, f"{run.steps[-1]:,.0f}", ends, _line(means)])
        print_table("", ("run", "step", "loss", ""), rows)
        if not output:
            echo("--output FILE.png, .svg or .html draws them", err=True)
    _write_losses(curves, [axis], smooth, output, data)


def _line(means: list[float]) -> str:
    """Draws a curve in a line of text, up to its value after a tenth of the steps: the first steps
    would flatten all others."""
    from mtcli.core.runs.sparkline import sparkline

    return sparkline(means, LINE_WIDTH, means[len(means) // 10])


def _compare(names: list[str], smooth: int, output: str | None, json_out: str | None) -> None:
    from mtcli.core.runs.loss_curves import read_curves
    from mtcli.core.runs.run_comparison import compare_runs
    from mtcli.core.runs.run_search import find_all_runs
    from mtcli.core.runs.run_summary import summaries
    from mtcli.core.runtime.console import print_table

    folders = find_all_runs(names)
    if len(folders) < 2:
        raise wrong(f"{' '.join(names)} holds 1 run, and at least 2 are compared", "name another")
    curves = read_curves(folders)
    comparison = compare_runs(curves, summaries(folders))
    data, tables = comparison.as_json(curves), _tables(curves, comparison)
    if answer(data, json_out):
        for title, columns, rows in tables:
            print_table(title, columns, rows)
    _write_losses(curves, ["tokens", "time"], smooth, output, data, tables)


def _write_losses(
    curves: "list[LossCurves]",
    axes: list[str],
    smooth: int,
    output: str | None,
    data: dict[str, Any],
    tables: Tables = (),
) -> None:
    """Writes the picture or page, if any."""
    if not output:
        return
    from mtcli.core.runs.loss_charts import Look
    from mtcli.core.runs.run_pictures import names_of, save_losses, write_losses_page

    look = Look(names_of([run.folder for run in curves]), smooth)
    if output.endswith(".html"):
        write_losses_page(output, curves, axes, look, data, tables)
    else:
        save_losses(output, curves, axes, look)
    say_wrote(output)


def _watch(name: str, every: float, once: bool, json_out: str | None) -> None:
    from mtcli.core.runs.run_search import require_one_run
    from mtcli.core.runs.watch_screen import watch

    glance = watch(require_one_run(name), every, once, quiet=json_out == "-")
    answer(glance.figures(), json_out)
    if glance.run.state in ("failed", "dead lock"):
        raise typer.Exit(Exit.FAILED)


def _tables(curves: "list[LossCurves]", comparison: "Comparison") -> Tables:
    """Returns the tables of a comparison as (title, columns, rows)."""
    from mtcli.core.config.untrusted import shown
    from mtcli.core.evaluate.compared_rows import COLUMNS, compared_rows
    from mtcli.core.runs.loss_charts import count_words
    from mtcli.core.runs.run_pictures import names_of

    names = names_of([run.folder for run in curves])
    after = f"after {count_words(comparison.tokens)} tokens", f"after {comparison.seconds:.4g} s"
    figures = [
        [name, f"{f.tokens:,.0f}", str(timedelta(seconds=round(f.seconds)))]
        + [_number(x, ".4f") for x in (f.loss, f.loss_at_tokens, f.loss_at_seconds, f.valid_loss)]
        for name, f in zip(names, comparison.figures, strict=True)
    ]
    columns = ["run", "tokens", "time", "loss", *after, "least valid"]
    tables: list[tuple[str, list[str], list[list[str]]]] = [("", columns, figures)]
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
