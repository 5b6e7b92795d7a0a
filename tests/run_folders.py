"""Run folders as `mtcli train` writes them, without training: config, metrics, events, lock."""

import json
import math
import os
import socket
from pathlib import Path

from tiny import GPT, run_config

from mtcli.core.config.loading import dump_toml
from mtcli.core.training.run_lock import LOCK, _this_process

TOKENS, SECONDS = 32, 0.5


def write_run(folder, steps=20, of=None, saved=(), valid_every=0, **sections):
    """Writes a run that has come to `steps` of `of` and saved some; loss falls as 4 / sqrt(step),
    and validation losses are a tenth above it."""
    folder.mkdir(parents=True)
    train = {"output": str(folder), "steps": of or steps} | sections.pop("train", {})
    (folder / "config.toml").write_text(dump_toml(run_config(GPT, train=train, **sections)))
    (folder / "run.json").write_text(json.dumps({"world": 1, "host": "node7"}))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "tokens": TOKENS, "loss": loss_at(step), "lr": 1e-3}
            row |= {"grad_norm": 1.0, "step_seconds": SECONDS, "mfu": None}
            row |= {"tokens_per_second": TOKENS / SECONDS, "total_tokens": TOKENS * step}
            row |= {"total_seconds": SECONDS * step, "memory_bytes": 3 << 29}
            if valid_every and step % valid_every == 0:
                row["valid_loss"] = 1.1 * loss_at(step)
            file.write(json.dumps(row) + "\n")
    add_events(folder)
    for step in saved:
        write_checkpoint(folder, step)
    return folder


def loss_at(step):
    return 4.0 / math.sqrt(step)


def add_events(folder, *events):
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def write_checkpoint(folder, step, size=1000):
    """Writes files with a checkpoint's names; returns its folder."""
    path = Path(folder) / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    (path / "rank-00000.safetensors").write_bytes(bytes(size))
    return path


def lock(folder, **changes):
    """Locks a run as this process does, or as one that differs in some facts."""
    holder = _this_process()._asdict() | changes
    (folder / LOCK).write_text(json.dumps(holder))


def lock_elsewhere(folder):
    """Locks a run as a process of another machine."""
    lock(folder, host="node9", boot="another", namespace="another")


def lock_dead(folder):
    """Locks a run as a process of this machine that has ended."""
    lock(folder, host=socket.gethostname(), pid=2**22 + 1)


def age(folder, moment):
    """Sets when all files of a run were last changed, in Unix seconds."""
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (moment, moment), follow_symlinks=False)
