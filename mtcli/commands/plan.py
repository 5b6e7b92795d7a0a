"""`mtcli plan`: what would this run cost? Needs no GPU; torch is imported in subprocesses alone."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mtcli.commands.options import (
    Force,
    JsonOut,
    MovedBase,
    NoCalibrate,
    OptionalConfig,
    Overrides,
    given_flags,
)
from mtcli.commands.output import echo, refusing, say_wrote, write_json

if TYPE_CHECKING:
    from mtcli.core.config.schema import RunConfig
    from mtcli.core.data.tokenized import TextData
    from mtcli.core.plan.answer import PlanAnswer, PlanRequest
    from mtcli.core.rehearse.dry_run import DryRun

OF_PLANS: tuple[str, ...]
OF_PLANS = ("config", "base", "overrides", "fixed", "gpus", "device", "top", "global_batch", "seq")
OF_PLANS += (
    "ranks",
    "draw",
    "plot",
    "output",
    "sbatch",
    "jobset",
    "dry_run",
    "rank",
    "no_calibrate",
)
OF_PLANS += ("tokens", "price", "assume", "minimise", "calibration")
DRAWN_WIDTH = 100  # columns of a timeline, where there are as many

Fixed = Annotated[
    list[str],
    typer.Option(
        "--fix",
        metavar="SECTION.FIELD=VALUE",
        default_factory=list,
        show_default=False,
        help="search layouts with this value, such as parallel.tp=8; may be given several times",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**20,
        help="number of devices; for a bare preset, search layouts",
        show_default="the fewest that hold it",
    ),
]
DeviceKind = Annotated[
    str | None,
    typer.Option(
        show_default="h100 with --gpus, else cpu",
        help="kind of device, such as a100-80gb or cpu; its links may "
        "follow: h100,network=ethernet-100,link=pcie-512,node=4",
    ),
]
Top = Annotated[
    int | None,
    typer.Option(min=1, max=1000, help="search every legal layout; show the best of K kinds"),
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", min=1, max=10**9, help="sequences of a step")
]
Seq = Annotated[int | None, typer.Option(min=1, max=10**9, help="tokens of a sequence")]
RankMaps = Annotated[
    bool, typer.Option("--ranks", help="show each rank's placement on both grids, and all groups")
]
Draw = Annotated[bool, typer.Option("--draw", help="draw the pipeline's timeline")]
Plot = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="write the timeline as a picture"),
]
Output = Annotated[
    str | None, typer.Option(metavar="FILE", help="write the config of the best layout")
]
Sbatch = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="write the Slurm script that trains --output's config"),
]
JobSet = Annotated[
    str | None,
    typer.Option("--jobset", metavar="FILE", help="the same as a JobSet of Kubernetes"),
]
DryRunFlag = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="take a step of the real trainer on fake tensors; count its memory"
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(min=0, max=2**20 - 1, help="the rank of the dry run", show_default="the fullest"),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="tokens of the run, such as 300e9 or 15T: time, saves, failures, kWh",
        show_default="those of its steps",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(min=0, max=1e9, help="price of an hour of one device; the same, and money"),
]
Assume = Annotated[
    list[str],
    typer.Option(
        "--assume",
        metavar="NAME=VALUE",
        default_factory=list,
        show_default=False,
        help="storage and copy (GB/s), failures (a day of 1,000 devices), restart (minutes), pue",
    ),
]
Minimise = Annotated[
    Literal["time", "money", "energy"],
    typer.Option(help="what to search for; money and energy also try half of --gpus, a quarter..."),
]
CalibrationFile = Annotated[
    str | None,
    typer.Option("--calibration", metavar="FILE", help="the device's rates, of mtcli calibrate"),
]
Presets = Annotated[bool, typer.Option("--presets", help="list the presets")]


def plan(
    context: typer.Context,
    overrides: Overrides,
    fixed: Fixed,
    assume: Assume,
    config: OptionalConfig = None,
    base: MovedBase = None,
    gpus: Gpus = None,
    device: DeviceKind = None,
    top: Top = None,
    global_batch: GlobalBatch = None,
    seq: Seq = None,
    ranks: RankMaps = False,
    draw: Draw = False,
    plot: Plot = None,
    output: Output = None,
    sbatch: Sbatch = None,
    jobset: JobSet = None,
    force: Force = False,
    dry_run: DryRunFlag = False,
    rank: Rank = None,
    tokens: Tokens = None,
    price: Price = None,
    minimise: Minimise = "time",
    calibration: CalibrationFile = None,
    presets: Presets = False,
    no_calibrate: NoCalibrate = False,
    json_out: JsonOut = None,
) -> None:
    """Check a run config; predict its memory, step time and bubble; search better layouts.

    Exit codes: 2 where the config is illegal, with every problem; 1 where it does not fit, or where
    a dry run holds other bytes than were predicted.
    """
    from mtcli.core.plan.tables import NOTHING

    with refusing(json_out, **NOTHING):
        _require_outputs(plot, output)
        _require_launch_files({"--sbatch": sbatch, "--jobset": jobset}, output, force)
        if presets:
            _require_alone(given_flags(context, OF_PLANS))
            return _list_presets(json_out)
        from mtcli.core.checkpoint.fine_tuning import source_of, starting_tokenizer
        from mtcli.core.data.vocabulary import with_vocabulary
        from mtcli.core.plan.answer import answer, read_request, with_run
        from mtcli.core.plan.launch_files import nodes_of, write_launch_files
        from mtcli.core.rehearse.request import rehearsed

        source = source_of(_source(config, rank, dry_run), base=base)
        sizes = {"batch.global_batch_size": global_batch, "batch.seq_len": seq}
        overrides = with_vocabulary(source, overrides, starting_tokenizer)
        requested = [*overrides, *(f"{field}={value}" for field, value in sizes.items() if value)]
        asked = read_request(source, requested, fixed, gpus, device, not no_calibrate)
        asked = with_run(asked, tokens, price, minimise, assume)
        asked = _calibrated(asked, calibration) if calibration else asked
        texts = _texts(asked.config) if asked.config else []
        planned = answer(asked, top, rehearsed)
        planned = replace(planned, data=tuple(text.estimate() for text in texts))
        if sbatch or jobset:
            nodes_of(planned.prediction)  # refuses what fills none, ahead of any output
    counted = None
    if dry_run:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # fake ranks have no hooks
        from mtcli.core.rehearse.dry_run import dry_run as take_dry_run  # the one option with torch

        counted = take_dry_run(planned.config, planned.prediction, rank)
    _show(planned, json_out, ranks, draw, counted)
    if plot:
        from mtcli.core.profile.render.pictures import save_timeline

        save_timeline(planned.drawing, planned.drawing_title, plot)
    if output:
        if sbatch or jobset:
            write_launch_files(planned, output, sbatch, jobset)
        planned.save_config(output)
    say_wrote(plot, sbatch, jobset, output)
    if counted:
        counted.require_agreement()
    planned.require_fit()


def _source(config: str | None, rank: int | None, dry_run: bool) -> str:
    """The config or preset to plan. Raises MtcliError where it, or a flag that another needs, is
    missing."""
    from mtcli.core.config.errors import MtcliError, Problem

    problems = []
    if rank is not None and not dry_run:
        said = f"--rank {rank} names the rank of a dry run"
        problems.append(Problem(said, "add --dry-run", "--rank"))
    if config is None:
        hint = "a TOML file or a preset; --presets lists them"
        problems.append(Problem("it is missing", hint, "CONFIG"))
    if problems:
        raise MtcliError(*problems)
    assert config is not None
    return config


def _calibrated(asked: "PlanRequest", calibration: str) -> "PlanRequest":
    """Sets the rates that `mtcli calibrate` measured of the device."""
    from mtcli.core.profile.calibration_file import measured_device

    return replace(asked, device=measured_device(asked.device, calibration))


def _texts(config: "RunConfig") -> "list[TextData]":
    """The text of the run's data that is not tokenized yet. Raises MtcliError where that needs a
    tokenizer."""
    if not any(config.words_by_field.values()):
        return []  # without numpy, which takes most of the time of a plan
    from mtcli.core.data.tokenized import texts_of
    from mtcli.core.training.run_tokenizer import extended_tokenizer

    return [text for text in texts_of(config, extended_tokenizer(config)) if not text.is_ready]


def _require_outputs(plot: str | None, output: str | None) -> None:
    """Raises MtcliError, ahead of any measurement, where an output file could not be written."""
    from mtcli.core.runtime.outputs import require_picture, require_writable

    if plot:
        require_picture(plot, "--plot")
    if output:
        require_writable(output, "--output")


def _require_launch_files(files: dict[str, str | None], output: str | None, force: bool) -> None:
    """Raises MtcliError for launch files without --output, or that exist without --force."""
    from mtcli.core.config.errors import MtcliError, Problem
    from mtcli.core.runtime.outputs import require_writable

    problems = []
    for flag, target in files.items():
        if target is None:
            continue
        require_writable(target, flag)
        if output is None:
            problems.append(Problem("it names the config of a plan", "--output run.toml", flag))
        if os.path.exists(target) and not force:
            problems.append(Problem(f"{target} exists", "--force to replace it", flag))
    if problems:
        raise MtcliError(*problems)


def _require_alone(given: list[str]) -> None:
    """Raises MtcliError for flags of a plan together with --presets, which plans nothing."""
    from mtcli.core.config.errors import wrong

    if given:
        said = f"--presets plans nothing, and has no use for {', '.join(given)}"
        raise wrong(said, f"--presets without {'it' if len(given) == 1 else 'them'}", "--presets")


def _show(
    planned: "PlanAnswer", json_out: str | None, ranks: bool, draw: bool, counted: "DryRun | None"
) -> None:
    from mtcli.core.mesh.update_table import COLUMNS, TITLE, update_table
    from mtcli.core.plan import tables
    from mtcli.core.plan.budget import PHASES, phase_rows
    from mtcli.core.runtime.console import print_line, print_table, width
    from mtcli.core.schedule.timeline import draw as draw_timeline

    layout = planned.prediction.work.layout
    if json_out:
        places, groups = tables.rank_coordinates, tables.rank_groups
        more = {"ranks": places(layout), "groups": groups(layout)} if ranks else {}
        more |= {"dry_run": counted.as_json()} if counted else {}
        write_json(tables.as_json(planned) | more, json_out)
    if json_out == "-":
        return
    print_table(planned.title, ("", ""), tables.summary_rows(planned))
    if planned.phases:
        title = "Phases, * with the most bytes; the tables are of the run's own settings"
        print_table(title, PHASES, phase_rows(planned.phases))
    stages = tables.stage_table(planned.prediction)
    print_table("Memory of a rank of each pipeline stage, * the fullest", *stages)
    if counted:
        print_table(counted.title, ("bytes", "counted", "planned", "off by"), counted.rows())
    config = planned.config
    if rows := update_table(config.model, config.lora, config.optimizer):
        print_table(TITLE, COLUMNS, rows)
    _show_search(planned)
    if draw:
        echo(planned.drawing_title)
        echo(draw_timeline(planned.drawing, width(DRAWN_WIDTH)))
    if ranks:
        print_table(*tables.rank_table(layout))
        for line in tables.group_lines(layout):
            print_line(line, indent="  ")


def _show_search(planned: "PlanAnswer") -> None:
    from mtcli.core.plan import tables
    from mtcli.core.runtime.console import print_table

    if planned.candidates:
        rows = tables.candidate_rows(planned.candidates)
        print_table(planned.search_title, tables.CANDIDATES, rows)
        rows = tables.neighbour_rows(planned.neighbours)
        print_table("The best with one field changed (estimated)", tables.NEIGHBOURS, rows)
    if planned.enough:
        print_table(*tables.enough_table(planned.enough))


def _list_presets(json_out: str | None) -> None:
    from mtcli.core.config.loading import load_config, preset_names
    from mtcli.core.mesh.parameters import count_active, count_parameters
    from mtcli.core.runtime.console import print_table

    models = {name: load_config(name).model for name in preset_names()}
    counts = {name: (count_parameters(m), count_active(m)) for name, m in models.items()}
    if json_out:
        write_json(
            [{"name": n, "parameters": a, "active": b} for n, (a, b) in counts.items()], json_out
        )
    if json_out != "-":
        rows = [[name, f"{a:,}", f"{b:,}"] for name, (a, b) in counts.items()]
        print_table("Presets", ("name", "parameters", "active"), rows)
