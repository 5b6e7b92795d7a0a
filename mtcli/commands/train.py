"""`mtcli train`: pre-trains or fine-tunes, on one process or on every rank of a launcher."""

import json
import sys
from contextlib import nullcontext, redirect_stdout
from functools import partial
from os.path import isdir  # false for names that no folder can have, where Path's raises
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from mtcli.commands.output import answer, answering, echo
from mtcli.commands.ranks import num_ranks, run_ranks

if TYPE_CHECKING:
    from mtcli.core.config.loading import Table
    from mtcli.core.config.schema import RunConfig
    from mtcli.core.data.tokenized import TextData
    from mtcli.core.runtime.launch import Runtime
    from mtcli.core.training.loop import OpenTasks
    from mtcli.core.training.reselect import Reselect

Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="go on from the newest checkpoint of train.output, or of CONFIG where that is a run",
    ),
]
StartOver = Annotated[
    bool,
    typer.Option(
        "--start-over",
        help="begin a run anew that has saved no checkpoint to go on from; its records are kept",
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        min=0,
        max=1000,
        help="start again from the last checkpoint when a worker dies",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="check everything, show the first batch and the planned memory and time; write "
        "nothing",
    ),
]


@answering
def train(
    overrides: Overrides,
    config: OptionalConfig = None,
    nproc: Nproc = 1,
    resume: Resume = False,
    start_over: StartOver = False,
    init: InitFrom = None,
    base: MovedBase = None,
    skip_bad: SkipBad = False,
    max_restarts: MaxRestarts = 0,
    dry_run: DryRun = False,
    json_out: JsonOut = None,
) -> None:
    """Train or fine-tune a model from a config or a Hugging Face folder; writes a run folder."""
    from mtcli.core.checkpoint.fine_tuning import source_of, starting_tokenizer, weights_note
    from mtcli.core.config.errors import collect_errors
    from mtcli.core.data.vocabulary import with_vocabulary
    from mtcli.core.runtime.attempts import times_restarted
    from mtcli.core.runtime.launch import environment_world, speaks_first
    from mtcli.core.runtime.private_folder import adding_to_no_cache
    from mtcli.core.runtime.slurm import require_srun
    from mtcli.core.training.run_config import planned_config, with_texts
    from mtcli.core.training.run_folder import how_it_goes_on

    require_srun(nproc)
    overrides = [*overrides, "data.skip_bad=true"] if skip_bad else overrides
    folder_overrides = _own_folder(config) if resume or start_over else []
    overrides = [*folder_overrides, *overrides]

    first = environment_world() is None or dry_run
    say = partial(echo, err=True)

    def checked_config() -> "tuple[RunConfig, list[TextData]]":
        source, again = source_of(config, init, base), times_restarted() > 0
        begins = resume or again, start_over or again
        checks = [lambda: _require_folder(source, overrides, *begins)] if first else []
        flags, texts = with_texts(
            source, overrides, num_ranks(nproc), say, *checks, config_name=config
        )
        size = max((text.vocab_size for text in texts), default=None)
        flags = with_vocabulary(source, flags, starting_tokenizer, size)
        start = partial(_require_start, source, flags, *begins, not texts)
        run: RunConfig
        run, *_ = collect_errors(
            lambda: planned_config(source, flags, num_ranks(nproc)),
            # ranks find out when they start
            *([start] if first else []),
            otherwise=start,
        )
        is_new = speaks_first() and not (resume or start_over or init)
        if is_new and (note := weights_note(config, run.train.init)):
            say(note)
        return run, texts

    if dry_run:
        with adding_to_no_cache():
            return _rehearse(*checked_config(), num_ranks(nproc), json_out)
    run, _ = checked_config()

    def work(runtime: "Runtime") -> bool:
        from mtcli.core.training.loop import train as train_run

        reselect = _reselect(run, runtime) if run.data.reselect_every else None
        with redirect_stdout(sys.stderr) if json_out == "-" else nullcontext():
            ended = train_run(
                run,
                runtime,
                resume=resume,
                anew=start_over,
                reselect=reselect,
                open_tasks=_open_tasks() if run.eval else None,
            )
        if json_out and runtime.rank == 0:
            answer(_what_it_did(run.train.output), json_out)
        return ended

    goes_on = partial(how_it_goes_on, Path(run.train.output))
    if run_ranks(nproc, run.train, work, max_restarts, goes_on) is False:  # it was told to stop
        raise KeyboardInterrupt


def _rehearse(
    run: "RunConfig", pending: "list[TextData]", world: int, json_out: str | None
) -> None:
    """Prints what a run would do; of the ranks that a launcher started, the first one alone."""
    from mtcli.core.runtime.launch import compute_device, environment_rank, environment_world

    if environment_rank() > 0:
        return
    from mtcli.core.rehearse.run_start import rehearse_start
    from mtcli.core.training.run_log import print_header

    for local_rank in range(world if environment_world() is None else 1):
        device = compute_device(run.train.device, local_rank)
    start = rehearse_start(run, world, device, pending)
    for note in start.notes:
        echo(note, err=True)
    if answer(start.as_json(), json_out):
        print_header(run, start.lines)
    start.require_fit()


def _what_it_did(folder: str) -> dict[str, Any]:
    """Returns the figures of the run in a folder, without its curves, and its newest checkpoint."""
    from mtcli.core.checkpoint.folder import CHECKPOINTS, step_folders
    from mtcli.core.profile.finished_run import read_run, summary_of

    run = read_run(folder)
    saved = step_folders(run.folder / CHECKPOINTS)
    figures = summary_of(run)
    del figures["curves"], figures["rank_map"]
    newest = str(saved[-1]) if saved else None
    return {"dry_run": False, **figures, "step": run.rows[-1]["step"], "checkpoint": newest}


def _reselect(run: "RunConfig", runtime: "Runtime") -> "Reselect":
    """Imports selection, which opens checkpoints as models, for runs that select again alone."""
    from mtcli.core.select.reselect import select_again

    return partial(select_again, run, runtime)


def _open_tasks() -> "OpenTasks":
    """Imports evaluation, for runs with [[eval]] tables alone."""
    from mtcli.core.evaluate.during_training import TrainingTasks

    return TrainingTasks


def _own_folder(config: str | None) -> list[str]:
    """Overrides that set the run's folder to CONFIG, if that is a run folder: one that was moved,
    or named from another working directory, has another path in its config.toml."""
    from mtcli.core.training.run_folder import holds_run

    if config is None or not isdir(config) or not holds_run(Path(config)):
        return []
    return [f"train.output={json.dumps(config, ensure_ascii=False)}"]


def _require_folder(source: "str | Table", overrides: list[str], resume: bool, anew: bool) -> None:
    """Raises MtcliError where a run could not begin in its folder."""
    from mtcli.core.config.loading import read_config
    from mtcli.core.training.run_lock import require_startable

    config, _ = read_config(source, overrides)
    if config is not None:
        require_startable(Path(config.train.output), resume, anew)


def _require_start(
    source: "str | Table", overrides: list[str], resume: bool, anew: bool, has_data: bool = True
) -> None:
    """Raises MtcliError with all problems of a run's folder, initial weights and, where it is
    there, data."""
    from mtcli.core.checkpoint.fine_tuning import require_weights
    from mtcli.core.config.errors import collect_errors
    from mtcli.core.config.loading import read_config
    from mtcli.core.data.loader import require_data
    from mtcli.core.data.subset import require_subset
    from mtcli.core.evaluate.tasks.registry import require_training_tasks
    from mtcli.core.training.run_lock import require_startable
    from mtcli.core.training.run_tokenizer import new_ids

    config, _ = read_config(source, overrides)
    if config is None:
        return
    steps = [
        lambda: require_training_tasks(config.eval),
        lambda: require_startable(Path(config.train.output), resume, anew),
    ]
    of_weights = (require_weights, new_ids)
    of_data = [lambda: require_data(config), lambda: require_subset(config)]
    collect_errors(
        *(of_data if has_data else []),
        *steps,
        *([] if resume else [partial(check, config) for check in of_weights]),
    )
