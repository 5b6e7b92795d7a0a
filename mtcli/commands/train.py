"""`mtcli train`: pre-train or fine-tune, on one process or on every rank of a launcher."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtcli.commands.options import ConfigFile, Nproc, Overrides
from mtcli.commands.ranks import num_ranks, run_ranks

if TYPE_CHECKING:
    from mtcli.core.runtime.launch import Runtime

Resume = Annotated[
    bool, typer.Option("--resume", help="go on from the newest checkpoint of train.output")
]
InitFrom = Annotated[
    str | None,
    typer.Option("--init", metavar="CHECKPOINT", help="start from these weights (fine-tuning)"),
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


def train(
    config: ConfigFile,
    overrides: Overrides,
    nproc: Nproc = 1,
    resume: Resume = False,
    init: InitFrom = None,
    max_restarts: MaxRestarts = 0,
) -> None:
    """Train or fine-tune a model from a config; a run folder comes out."""
    from mtcli.core.config.errors import collect_errors
    from mtcli.core.config.rules import load_checked
    from mtcli.core.runtime.launch import environment_world, restarts

    resume = resume or restarts() > 0
    start = partial(_require_start, config, overrides, resume, init)
    run, *_ = collect_errors(
        lambda: load_checked(config, overrides, num_ranks(nproc)),
        *([start] if environment_world() is None else []),  # ranks find out when they start
        otherwise=start,
    )

    def work(runtime: "Runtime") -> bool:
        from mtcli.core.profile.measure import peak_flops
        from mtcli.core.training.loop import train as train_run

        measure_peak = partial(peak_flops, run, runtime)
        return train_run(run, runtime, resume=resume, init=init, measure_peak=measure_peak)

    if run_ranks(nproc, run.train, work, max_restarts) is False:  # it was told to stop
        raise KeyboardInterrupt


def _require_start(source: str, overrides: list[str], resume: bool, init: str | None) -> None:
    """Raises MtcliError with all that is wrong with a run's data, folder and first weights."""
    from mtcli.core.checkpoint.folder import find_checkpoint
    from mtcli.core.config.errors import collect_errors
    from mtcli.core.config.loading import read_config
    from mtcli.core.data.loader import require_data
    from mtcli.core.training.run_lock import require_startable

    config, _ = read_config(source, overrides)
    if config is None:
        return
    steps = [
        lambda: require_data(config),
        lambda: require_startable(Path(config.train.output), resume),
    ]
    collect_errors(*steps, *([lambda: find_checkpoint(Path(init))] if init else []))
