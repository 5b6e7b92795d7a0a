"""`mtcli` whose training waits before each step until a file allows it: a rank of a drill.

PACE=FILE torchrun ... tests/commands/paced.py train CONFIG   # FILE holds a number of steps
"""

import os
import sys
import time
from pathlib import Path

from mtcli.__main__ import main
from mtcli.core.training.step import Trainer

train_step = Trainer.train_step


def paced(trainer, loader):
    """The next step, once the file allows it."""
    file = Path(os.environ["PACE"])
    while int(file.read_text() or 0) <= trainer.step:
        time.sleep(0.02)
    return train_step(trainer, loader)


if __name__ == "__main__":
    Trainer.train_step = paced
    sys.exit(main())
