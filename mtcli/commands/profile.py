"""`mtcli profile`: where do a step's time and memory go, compared with the plan?"""

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mtcli.commands.options import (
    ConfigFile,
    JsonOut,
    MovedBase,
    NoCalibrate,
    Nproc,
    Overrides,
    given_flags,
)
from mtcli.commands.output import answer, answering, echo, say_wrote
from mtcli.commands.ranks import num_ranks, run_ranks

if TYPE_CHECKING:
    from mtcli.core.config.schema import RunConfig
    from mtcli.core.profile.figures import Profile
    from mtcli.core.runtime.launch import Runtime

OF_STEPS = ("overrides", "steps", "warmup", "base", "nproc", "trace", "no_calibrate")

Steps = Annotated[int, typer.Option("--steps", min=1, max=10**6, help="timed steps")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, max=10**6, help="steps before those")]
Trace = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="write a Chrome trace, for Perfetto")
]
ReportFile = Annotated[
    str | None, typer.Option("--report", metavar="FILE", help="write one HTML page of charts")
]
Plot = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="write a picture: .png, .svg or .pdf")
]


@answering
def profile(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides,
    steps: Steps = 10,
    warmup: Warmup = 3,
    base: MovedBase = None,
    nproc: Nproc = 1,
    trace: Trace = None,
    report: ReportFile = None,
    plot: Plot = None,
    no_calibrate: NoCalibrate = False,
    json_out: JsonOut = None,
) -> None:
    """Run a few steps of a config with timers, or show what a finished run's folder measured.

    A run folder is only read, no step is run. To measure its config again, name its config.toml.
    """
    from mtcli.core.profile.finished_run import is_run

    _require_outputs(trace, report, plot)
    if is_run(config):
        _require_no_steps(context, config)
        return _show_run(config, report, plot, json_out)
    from mtcli.core.checkpoint.fine_tuning import source_of, starting_tokenizer
    from mtcli.core.config.rules import load_checked
    from mtcli.core.data.vocabulary import with_vocabulary
    from mtcli.core.training.run_config import with_texts

    source, world = source_of(config, base=base), num_ranks(nproc)
    flags, _ = with_texts(source, overrides, world, partial(echo, err=True), config_name=config)
    run = load_checked(source, with_vocabulary(source, flags, starting_tokenizer), world)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's notes on stderr
    total = run.train.model_copy(update={"steps": max(run.train.steps, warmup + steps + 1)})
    run = run.model_copy(update={"train": total})

    def work(runtime: "Runtime") -> None:
        from mtcli.core.profile.figures import Profile
        from mtcli.core.profile.measure import measure

        if runtime.rank == 0:
            echo(_purpose(run, runtime.world, warmup, steps), err=True)
        measured = measure(run, runtime, warmup, steps)
        if runtime.rank > 0:
            return
        figures = Profile(run, runtime.world, measured.device, measured.records, not no_calibrate)
        if trace:
            from mtcli.core.profile.trace import write_trace

            write_trace(trace, measured.trace, measured.records)
        _show_profile(figures, report, plot, json_out)
        say_wrote(trace, report, plot)

    run_ranks(nproc, run.train, work)


def _require_no_steps(context: typer.Context, run: str) -> None:
    """Raises MtcliError for flags of measured steps together with a finished run's folder."""
    from mtcli.core.config.errors import MtcliError, Problem

    if flags := given_flags(context, OF_STEPS):
        why = f"needs steps to run, and {run} is a run that is finished"
        hint = f"mtcli profile {run}/config.toml {' ... '.join(flags)} ..."
        raise MtcliError(*(Problem(f"{flag} {why}", hint, flag) for flag in flags))


def _purpose(config: "RunConfig", world: int, warmup: int, steps: int) -> str:
    """A line, with numbers, on what the command is about to do."""
    from mtcli.core.plan.memory import state_bytes
    from mtcli.core.plan.workload import Workload

    work = Workload.of(config, world)
    rank_bytes = max(sum(state_bytes(work, pp_rank)) for pp_rank in range(work.layout.pp))
    tokens = work.global_batch_size * work.seq_len
    lines = (
        f"layout {world} ranks: tp={work.layout.tp} pp={work.layout.pp} dp={work.layout.dp}",
        f"steps  {warmup} to warm up, {steps} timed, 1 under the profiler; {tokens:,} tokens each",
        f"rank   {rank_bytes / 2**20:,.1f} MiB of weights, gradients and optimizer",
    )
    return "\n".join(lines)


def _require_outputs(trace: str | None, report: str | None, plot: str | None) -> None:
    """Raises MtcliError, ahead of any step, where an output file could not be written."""
    from mtcli.core.runtime.outputs import require_extra, require_picture, require_writable

    if trace:
        require_writable(trace, "--trace", (".json",))
    if report:
        require_writable(report, "--report", (".html",))
        require_extra("matplotlib", "--report")
    if plot:
        require_picture(plot, "--plot")


def _show_profile(
    figures: "Profile", report: str | None, plot: str | None, json_out: str | None
) -> None:
    """Prints the measured figures, then computes the plan, for which a CPU may be calibrated."""
    from mtcli.core.profile.render.text import show_measured, show_planned

    if json_out != "-":
        show_measured(figures)
        sys.stdout.flush()
        show_planned(figures)
    if json_out:
        answer(figures.as_json(), json_out)
    if report:
        from mtcli.core.profile.render.html import write_profile_page

        write_profile_page(report, figures, figures.as_json())
    if plot:
        from mtcli.core.profile.render.pictures import save_profile

        save_profile(plot, figures)


def _show_run(folder: str, report: str | None, plot: str | None, json_out: str | None) -> None:
    from mtcli.core.profile.finished_run import read_run, summary_of
    from mtcli.core.profile.render.text import show_run

    run = read_run(folder)
    data = summary_of(run)
    if answer(data, json_out):
        show_run(run.rows, data)
    if report:
        from mtcli.core.profile.render.html import write_run_page

        write_run_page(report, run, data)
    if plot:
        from mtcli.core.profile.render.pictures import save_run

        save_run(plot, data)
    say_wrote(report, plot)
