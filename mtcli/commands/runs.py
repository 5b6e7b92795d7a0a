"""`mtcli runs`: which runs are there, how do they differ, and what space can be freed?"""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtcli.commands.options import JsonOut, refuse_flags
from mtcli.commands.output import answer, answering, echo
from mtcli.core.config.errors import wrong

if TYPE_CHECKING:
    from mtcli.core.runs.run_summary import RunSummary

FOLDER = "runs"  # where train.output is by default
# What each action takes, the fewest and the most of them, and its flags.
ACTIONS: dict[str, tuple[str, int, int]] = {"list": ("[FOLDER]", 0, 1)}
FLAGS = {"sort": ("list",)}
SHOWN_FIELDS = 6  # of the differing ones of a run in the table
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FOLDER]", help=f"the folder of runs [{FOLDER}]"),
]
Sort = Annotated[
    Literal["recent", "loss", "valid", "size", "name"],
    typer.Option("--sort", help="order of the table; recent has running ones first"),
]


@answering
def runs(
    context: typer.Context,
    words: Words = None,
    sort: Sort = "recent",
    json_out: JsonOut = None,
) -> None:
    """List runs: state, step, loss, tokens, time, size, and what differs in their configs."""
    action, names = _action(words or [])
    for flag, actions in FLAGS.items():
        if action not in actions:
            refuse_flags(context, (flag,), f"goes with {' and '.join(actions)}")
    _list(names[0] if names else FOLDER, sort, json_out)


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
