"""Runs `mtcli` in a process of its own, as a user would, and reads what a run wrote."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Of the preset `tiny`, for `--tiny`: a step of milliseconds.
SMALL = ("model.hidden_size=64", "model.vocab_size=512", "batch.seq_len=64")


def mtcli(*words: object, folder: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Runs a command, in a folder; returns its stdout. Ends the benchmark where it fails."""
    command = [sys.executable, "-m", "mtcli", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: mtcli {' '.join(command[3:])}\n{done.stderr[-2000:]}")
    return done.stdout


def sets(settings: Iterable[str]) -> list[str]:
    """The words `--set section.field=value` of settings."""
    return [word for setting in settings for word in ("--set", setting)]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
