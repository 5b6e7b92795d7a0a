"""Runs of `mtcli train` on forked ranks, each of which a fault can be put into.

Ranks are forked from a warm process and see the variables that torchrun sets, so a run takes about
a second; a fault is a function of a rank, called before its command.
"""

from command_line import mtcli
from tiny import metrics, write_run

STEPS = 9
EVERY = 3  # steps from one checkpoint to the next


class Drill:
    """A config in a folder, and what became of its run folder."""

    def __init__(self, folder, timeout=20.0):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.output = folder, folder / "run"
        train = {"steps": STEPS, "save_every": EVERY, "keep": 0, "timeout": timeout}
        self.config = write_run(folder, train=train)

    def train(self, *words, nproc=1, fault=None, settings=()):
        """Runs `mtcli train` to its end on some ranks, on each of which fault(rank) is called."""
        sets = [word for setting in settings for word in ("--set", setting)]
        done = mtcli("train", self.config, *sets, *words, "--nproc", nproc, fault=fault)
        assert "Traceback" not in done.stderr, done.errors
        return done

    def losses(self):
        """The loss of each step, the last word on it."""
        return {row["step"]: row["loss"] for row in metrics(self.output) if "loss" in row}

    def steps(self):
        """The steps of the complete checkpoints."""
        found = (self.output / "checkpoints").glob("step-*[0-9]")
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    def checkpoint(self, step):
        """The folder of a step's checkpoint."""
        return self.output / "checkpoints" / f"step-{step:08d}"
