"""`mtcli sweep`: trains many models of one shape as arrays, on one device or over dp ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtcli.commands.options import (
    InitFrom,
    JsonOut,
    MovedBase,
    Nproc,
    OptionalConfig,
    Overrides,
    SkipBad,
)
from mtcli.commands.output import answer, answering, echo, say_wrote
from mtcli.commands.ranks import num_ranks, run_ranks

if TYPE_CHECKING:
    from mtcli.core.runtime.launch import Runtime
    from mtcli.core.sweep.sweep import Sweep

Output = Annotated[
    str, typer.Option("--output", metavar="DIR", help="where each trial has a run folder")
]
GOES_ON = "what models have saved is kept: run the same command with --resume"
Vary = Annotated[
    list[str],
    typer.Option(
        "--vary",
        metavar="SECTION.FIELD=A,B,..",
        default_factory=list,
        show_default=False,
        help="values of a field, or a range LOW..HIGH to draw from; any number of times",
    ),
]
Random = Annotated[
    int | None,
    typer.Option(
        "--random", metavar="N", min=1, max=10_000, help="draw N trials instead of taking all"
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option("--seeds", metavar="K", min=1, max=1000, help="train every trial with K seeds"),
]
HyperbandRule = Annotated[
    str | None,
    typer.Option(
        "--hyperband",
        metavar="R,ETA",
        help="a run is R units; of each rung 1 in ETA trials goes on, to ETA times its units",
    ),
]
Median = Annotated[
    int | None,
    typer.Option(
        "--median",
        metavar="N",
        min=1,
        max=10**9,
        help="every N steps stop trials that are worse than the median",
    ),
]
MaxFused = Annotated[
    int | None,
    typer.Option(
        "--max-fused",
        metavar="B",
        min=1,
        max=10_000,
        help="largest number of models in an array",
        show_default="as many as fit in memory",
    ),
]
Sampler = Annotated[
    str | None,
    typer.Option("--sampler", metavar="optuna[:NAME]", help="have Optuna choose --random N trials"),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="go on from the newest checkpoint of each trial")
]
SharedBatches = Annotated[
    bool, typer.Option("--shared-batches", help="all seeds read the data in the same order")
]


@answering
def sweep(
    output: Output,
    overrides: Overrides,
    vary: Vary,
    config: OptionalConfig = None,
    init: InitFrom = None,
    base: MovedBase = None,
    random: Random = None,
    hyperband: HyperbandRule = None,
    median: Median = None,
    seeds: Seeds = None,
    shared_batches: SharedBatches = False,
    max_fused: MaxFused = None,
    sampler: Sampler = None,
    resume: Resume = False,
    skip_bad: SkipBad = False,
    nproc: Nproc = 1,
    json_out: JsonOut = None,
) -> None:
    """Train many models of one shape as one array, each with the run folder of a run alone."""
    from mtcli.core.checkpoint.fine_tuning import weights_note
    from mtcli.core.runtime.launch import environment_world, speaks_first
    from mtcli.core.sweep.record import require_startable
    from mtcli.core.sweep.run_plan import SweepRequest, sweep_plan

    request = SweepRequest(
        config=config,
        overrides=[*overrides, "data.skip_bad=true"] if skip_bad else overrides,
        output=Path(output),
        vary=vary,
        random=random,
        seeds=seeds,
        shared_batches=shared_batches,
        hyperband=hyperband,
        median=median,
        max_fused=max_fused,
        resume=resume,
        sampler=sampler,
        init=init,
        base=base,
    )
    plan = sweep_plan(request, num_ranks(nproc))
    if environment_world() is None and not (resume and plan.sampling):
        require_startable(plan.trials, plan.output, resume)
    train = plan.trials[0].config.train
    is_new = speaks_first() and not (resume or init)
    if is_new and (note := weights_note(config, train.init)):
        echo(note, err=True)

    def work(runtime: "Runtime") -> bool:
        from mtcli.core.sweep.run import train as train_all
        from mtcli.core.sweep.sweep import Sweep

        sweep = Sweep(plan, runtime)
        finished = train_all(sweep)
        if runtime.rank == 0:
            _report(sweep, json_out)
            if not finished:
                echo(f"stopped, as it was told to; {GOES_ON}", err=True)
        return finished

    if run_ranks(nproc, train, work, goes_on=lambda: GOES_ON) is False:  # it was told to stop
        raise KeyboardInterrupt


def _report(sweep: "Sweep", json_out: str | None) -> None:
    """Prints the table, draws the picture, and prints the names of the written files."""
    from mtcli.core.runtime.console import print_table
    from mtcli.core.sweep import board, record, settings

    summary = sweep.write()
    picture = _draw(sweep)
    if answer({**summary, "picture": picture}, json_out):
        columns = ("trial", record.MEAN_LOSS, "valid", "steps", "status")
        print_table("", columns, board.rows(sweep.records))
        if rows := [setting.row() for setting in settings.settings_of(sweep.records)]:
            print_table("Over seeds", settings.COLUMNS, rows)
    for end in sweep.at_ends():
        echo(str(end), err=True)
    say_wrote(picture, str(sweep.plan.output / record.NAME))


def _draw(sweep: "Sweep") -> str | None:
    """Draws the picture and returns its path; None, with a line that says so, without
    matplotlib."""
    from importlib.util import find_spec

    from mtcli.core.sweep import picture

    if find_spec("matplotlib") is None:
        echo("note: no picture without matplotlib: pip install 'mtcli[report]'", err=True)
        return None
    target = sweep.plan.output / picture.NAME
    picture.save_picture(target, sweep.records, sweep.plan.fields)
    return str(target)
