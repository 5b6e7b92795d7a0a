"""Runs of `mtcli train` on forked ranks, each of which a fault can be put into.

Ranks are forked from a warm process and see the variables that torchrun sets, so a run takes about
a second; a fault is a function of a rank, called before its command.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from ranks import warm
from tiny import GPT, documents

from mtcli.core.data.indexed import token_dtype, write_dataset

DEADLINE = 60.0
STEPS = 9
CONFIG = """
seed = 7
[model]
{model}
[batch]
seq_len = 8
global_batch_size = 4
[optimizer]
lr = 3e-3
[data]
train = ["{data}"]
[train]
steps = {steps}
save_every = 3
keep = 0
timeout = {timeout}
device = "cpu"
output = "{output}"
"""


class Run(NamedTuple):
    """What the ranks of a run said: exit codes (negative for signals) and stderr, by rank."""

    codes: list[int]
    errors: list[str]


class Drill:
    """A config in a folder, and what became of its run folder."""

    def __init__(self, folder, timeout=20.0):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.output = folder, folder / "run"
        write_dataset(folder / "data", documents(), token_dtype(101))
        model = "\n".join(f"{key} = {json.dumps(value)}" for key, value in GPT.items())
        values = {"data": folder / "data", "output": self.output, "timeout": timeout}
        (folder / "run.toml").write_text(CONFIG.format(model=model, steps=STEPS, **values))

    def train(self, *words, nproc=1, fault=None, settings=()):
        """Runs `mtcli train` to its end on some ranks, on each of which fault(rank) is called."""
        sets = [word for setting in settings for word in ("--set", setting)]
        arguments = ["train", str(self.folder / "run.toml"), *sets, *words]
        names = [self.folder / f"rank-{rank}.err" for rank in range(nproc)]
        where = (nproc, free_port())
        ranks = [
            warm().Process(target=_rank, args=(rank, *where, arguments, names[rank], fault))
            for rank in range(nproc)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + DEADLINE
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
        for process in ranks:
            process.kill()
            process.join()
        errors = [name.read_text() for name in names]
        assert not late, f"ranks {late} did not end: {errors}"
        assert not any("Traceback" in text for text in errors), errors
        return Run([process.exitcode for process in ranks], errors)

    def losses(self):
        """The loss of each step, the last word on it."""
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def steps(self):
        """The steps of the complete checkpoints."""
        found = (self.output / "checkpoints").glob("step-*[0-9]")
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    def checkpoint(self, step):
        """The folder of a step's checkpoint."""
        return self.output / "checkpoints" / f"step-{step:08d}"


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _rank(rank, world, port, arguments, errors: Path, fault):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ["LOCAL_WORLD_SIZE"] = str(max(2, world))  # a thread each: two wait for each other
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    if fault:
        fault(rank)
    from mtcli import __main__ as entry

    sys.argv = ["mtcli", *arguments]
    entry.main()
