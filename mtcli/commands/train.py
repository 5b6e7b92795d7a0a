"""`mtcli train`: pre-train or fine-tune, on one process or on every rank of a launcher."""

import sys
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
        "--max-restarts", min=0, help="start again from the last checkpoint when a worker dies"
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
    from mtcli.core.run_lock import require_startable
    from mtcli.core.runtime import bring_up, environment_world, launch, restarts
    from mtcli.core.spec import check
    from mtcli.core.spec.errors import every

    world = environment_world()
    (run,) = every(
        lambda: check.load_checked(config, overrides, world or nproc),
        otherwise=lambda: _require_data(config, overrides),
    )
    if world is None:
        # Asked here too, before torch is imported: the ranks, who take the folder, ask again.
        every(
            lambda: require_startable(Path(run.train.output), resume),
            otherwise=lambda: _require_data(config, overrides),
        )
        launch(nproc, sys.argv[1:], max_restarts)
        return
    resume = resume or restarts() > 0
    settings = run.train.device, run.train.timeout, run.train.matmul
    with bring_up(*settings, run.train.debug_collectives) as runtime:
        from mtcli.core.train import train as train_run  # imports torch: after the checks

        finished = train_run(run, runtime, resume=resume, init=init)
    if not finished:
        raise KeyboardInterrupt


def _require_data(source: str, overrides: list[str]) -> None:
    from mtcli.core.data.batches import require_data
    from mtcli.core.spec.load import read_config

    config, _ = read_config(source, overrides)
    if config is not None:
        require_data(config.data)
