"""What a training run needs before its first step, and what can be refused without torch."""

from pathlib import Path

from mtcli.core.checkpoint.finding import find_checkpoint
from mtcli.core.checkpoint.names import CHECKPOINTS, step_folders
from mtcli.core.data.batches import require_data
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.errors import every, wrong
from mtcli.core.spec.outputs import folder_of


def require_start(config: RunConfig, resume: bool, init: str | None) -> None:
    """Raises MtcliError with all that is wrong with a run's data, folder and first weights."""
    steps = [lambda: require_data(config), lambda: has_checkpoint(config, resume)]
    every(*steps, *([lambda: find_checkpoint(Path(init))] if init else []))


def has_checkpoint(config: RunConfig, resume: bool) -> bool:
    """Whether the run's folder holds a checkpoint to go on from.

    Raises MtcliError where it does and that was not asked for, or the folder cannot be one.
    """
    output = Path(config.train.output)
    with folder_of("train.output", output):
        there = bool(step_folders(output / CHECKPOINTS))
    if there and not resume:
        hint = "--resume goes on from it; or set train.output to another folder"
        raise wrong(f"{output} already holds a run", hint, "train.output")
    return there
