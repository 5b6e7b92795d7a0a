"""What a training run needs before its first step, and what can be refused without torch."""

from pathlib import Path

from mtcli.core.checkpoint.finding import find_checkpoint
from mtcli.core.data.batches import require_data
from mtcli.core.run_lock import require_startable
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.errors import every


def require_start(config: RunConfig, resume: bool, init: str | None) -> None:
    """Raises MtcliError with all that is wrong with a run's data, folder and first weights."""
    folder = Path(config.train.output)
    steps = [lambda: require_data(config), lambda: require_startable(folder, resume)]
    every(*steps, *([lambda: find_checkpoint(Path(init))] if init else []))
