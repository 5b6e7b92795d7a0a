"""`mtcli train`: pre-train or fine-tune, on one process or on every rank of a launcher."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mtcli.commands.options import ConfigFile, Nproc, Overrides

Resume = Annotated[
    bool, typer.Option("--resume", help="go on from the newest checkpoint of train.output")
]
Init = Annotated[
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
    init: Init = None,
    max_restarts: MaxRestarts = 0,
) -> None:
    """Train or fine-tune a model from a config; a run folder comes out."""
    from mtcli.core.config import rules
    from mtcli.core.config.errors import every
    from mtcli.core.runtime.launch import bring_up, environment_world, launch, restarts

    world = environment_world()
    resume = resume or restarts() > 0
    start = partial(_require_start, config, overrides, resume, init)
    run, *_ = every(
        lambda: rules.load_checked(config, overrides, world or nproc),
        *([start] if world is None else []),  # ranks find out when they start
        otherwise=start,
    )
    if world is None:
        launch(nproc, sys.argv[1:], max_restarts)
        return
    settings = run.train.device, run.train.timeout, run.train.matmul
    with bring_up(*settings, run.train.debug_collectives) as runtime:
        # both import torch: after the checks
        from mtcli.core.profile.measure import peak_flops
        from mtcli.core.training.loop import train as train_run

        measure_peak = partial(peak_flops, run, runtime)
        finished = train_run(run, runtime, resume=resume, init=init, measure_peak=measure_peak)
    if not finished:
        raise KeyboardInterrupt


def _require_start(source: str, overrides: list[str], resume: bool, init: str | None) -> None:
    """Raises MtcliError with all that is wrong with a run's data, folder and first weights."""
    from mtcli.core.checkpoint.folder import find_checkpoint
    from mtcli.core.config.errors import every
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
    every(*steps, *([lambda: find_checkpoint(Path(init))] if init else []))
