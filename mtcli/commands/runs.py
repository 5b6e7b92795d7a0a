"""`mtcli runs`: which runs are there, how do they differ, and what space can be freed?"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtcli.commands.options import JsonOut, refuse_flags
from mtcli.commands.output import answer, answering, echo, say_wrote
from mtcli.core.config.errors import Exit, wrong

if TYPE_CHECKING:
    from mtcli.core.runs.loss_curves import LossCurves
    from mtcli.core.runs.run_pictures import RunTable

FOLDER = "runs"  # where train.output is by default
# What each action takes, the fewest and the most of them, and its flags.
MANY = 10_000
ACTIONS: dict[str, tuple[str, int, int]] = {
    "list": ("[FOLDER]", 0, 1),
    "plot": ("RUN ...", 1, MANY),
    "compare": ("A B ...", 1, MANY),
    "watch": ("RUN", 1, 1),
    "prune": ("[FOLDER]", 0, 1),
}
FLAGS = {
    "sort": ("list",),
    "axis": ("plot",),
    "smooth": ("plot", "compare"),
    "output": ("plot", "compare"),
    "once": ("watch",),
    "interval": ("watch",),
    "keep": ("prune",),
    "caches": ("prune",),
    "yes": ("prune",),
}
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FOLDER | plot RUN .. | compare A B .. | watch RUN | prune FOLDER]",
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
Interval = Annotated[
    float,
    typer.Option("--every", min=0.1, max=3600, help="watch: seconds between two looks at the run"),
]
Keep = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10**6,
        show_default="its train.keep",
        help="prune: the newest checkpoints of a run that stay",
    ),
]
Caches = Annotated[
    bool, typer.Option("--caches", help="prune: also caches that were not used for a week")
]
Yes = Annotated[bool, typer.Option("--yes", help="prune: free it without asking")]


@answering
def runs(
    context: typer.Context,
    words: Words = None,
    sort: Sort = "recent",
    axis: Axis = "tokens",
    smooth: Smooth = 0,
    output: Output = None,
    interval: Interval = 2.0,
    once: Once = False,
    keep: Keep = None,
    caches: Caches = False,
    yes: Yes = False,
    json_out: JsonOut = None,
) -> None:
    """List runs: state, step, loss, tokens, time, size, what differs; plot, compare, watch, prune.

    plot draws losses over tokens, steps or time. compare draws them over tokens and time, lists the
    fields in which configs differ, and compares evaluations of one name in both run folders. watch
    shows a run until it ends, also one of another machine, or until q. prune lists what of runs
    that have ended can be freed, and asks first.
    """
    action, names = _action(words or [])
    for flag, actions in FLAGS.items():
        if action not in actions:
            refuse_flags(context, (flag,), f"goes with {' and '.join(actions)}")
    if action == "list":
        return _list(names[0] if names else FOLDER, sort, json_out)
    if action == "watch":
        return _watch(names[0], interval, once, json_out)
    if action == "prune":
        return _prune(names[0] if names else FOLDER, keep, (caches, yes), json_out)
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
    from mtcli.core.runs.run_tables import listed_table, sorted_runs
    from mtcli.core.runtime.console import print_line, print_table

    found = sorted_runs(summaries(find_runs(Path(folder))), sort)
    varied = varied_fields(found)
    rows = [run.as_json() | {"fields": {f: run.value(f) for f in varied}} for run in found]
    if not answer({"folder": folder, "varied": varied, "runs": rows}, json_out):
        return
    if not found:
        return echo(f"{folder} holds no run")
    print_table(*listed_table(found, varied))
    for run in found:
        if run.reason:
            print_line(f"{run.folder}: {run.state}: {run.reason}", indent="  ")


def _require_output(output: str | None) -> None:
    from mtcli.core.runtime.outputs import require_extra, require_writable

    if output:
        require_writable(output, "--output", (".png", ".svg", ".pdf", ".html"))
        require_extra("matplotlib", "--output")


def _plot(
    names: list[str], axis: str, smooth: int, output: str | None, json_out: str | None
) -> None:
    from mtcli.core.runs.loss_curves import read_curves
    from mtcli.core.runs.run_search import find_all_runs
    from mtcli.core.runs.run_tables import plotted_table
    from mtcli.core.runtime.console import print_table

    curves = read_curves(find_all_runs(names))
    data = {"runs": [run.as_json() for run in curves]}
    if answer(data, json_out):
        print_table(*plotted_table(curves, smooth))
        if not output:
            echo("--output FILE.png, .svg or .html draws them", err=True)
    _write_losses(curves, [axis], smooth, output, data)


def _compare(names: list[str], smooth: int, output: str | None, json_out: str | None) -> None:
    from mtcli.core.runs.loss_curves import read_curves
    from mtcli.core.runs.run_comparison import compare_runs
    from mtcli.core.runs.run_search import find_all_runs
    from mtcli.core.runs.run_summary import summaries
    from mtcli.core.runs.run_tables import compared_tables
    from mtcli.core.runtime.console import print_table

    folders = find_all_runs(names)
    if len(folders) < 2:
        raise wrong(f"{' '.join(names)} holds 1 run, and at least 2 are compared", "name another")
    curves = read_curves(folders)
    comparison = compare_runs(curves, summaries(folders))
    data, tables = comparison.as_json(curves), compared_tables(curves, comparison)
    if answer(data, json_out):
        for table in tables:
            print_table(*table)
    _write_losses(curves, ["tokens", "time"], smooth, output, data, tables)


def _write_losses(
    curves: "list[LossCurves]",
    axes: list[str],
    smooth: int,
    output: str | None,
    data: dict[str, Any],
    tables: "Sequence[RunTable]" = (),
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


def _watch(name: str, interval: float, once: bool, json_out: str | None) -> None:
    from mtcli.core.runs.run_search import require_one_run
    from mtcli.core.runs.watch_screen import watch

    glance = watch(require_one_run(name), interval, once, quiet=json_out == "-")
    answer(glance.figures(), json_out)
    if glance.run.state in ("failed", "dead lock"):
        raise typer.Exit(Exit.FAILED)


def _prune(folder: str, keep: int | None, flags: tuple[bool, bool], json_out: str | None) -> None:
    """Lists what can be freed, and frees it where the reader agrees. `flags`: --caches, --yes."""
    from mtcli.core.runs.disk_size import size_words
    from mtcli.core.runs.prunable import find_caches, find_prunable, find_tokens, free
    from mtcli.core.runs.run_search import find_runs
    from mtcli.core.runtime.console import print_table

    def note(text: str) -> None:
        echo(f"note: {text}", err=True)

    caches, yes = flags
    listed = find_runs(Path(folder))
    found = find_prunable(Path(folder), listed, keep, note)
    found += [*find_caches(), *find_tokens(listed)] if caches else []
    size = sum(one.size_bytes for one in found)
    if json_out != "-":
        cells = [[str(one.path), one.kind, size_words(one.size_bytes), one.why] for one in found]
        if cells:
            print_table("", ("", "kind", "size", "why"), cells)
        echo(f"{size_words(size)} can be freed" if found else f"{folder} has nothing to free")
        if found and not yes and sys.stdin.isatty() and sys.stdout.isatty():
            yes = typer.confirm("free it?")
        elif found and not yes:
            echo("--yes frees it", err=True)
    freed = free(found, note) if yes else 0
    items = [one.as_json() for one in found]
    data = {"folder": folder, "bytes": size, "items": items, "freed_bytes": freed}
    if answer(data, json_out) and yes and found:
        echo(f"freed {size_words(freed)}")
