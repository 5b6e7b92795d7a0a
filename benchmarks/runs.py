"""Runs `mtcli` and scripts in processes of their own, and reads what they wrote."""

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
    return python("-m", "mtcli", *words, folder=folder, env=env)


def answer(*words: object, env: Mapping[str, str] | None = None) -> Any:
    """The JSON in the last line that a script prints."""
    return json.loads(python(*words, env=env).splitlines()[-1])


def python(*words: object, folder: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Runs Python with these words; returns its stdout. Ends the benchmark where it fails."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command[1:])}\n{done.stderr[-2000:]}")
    return done.stdout


def sets(settings: Iterable[str]) -> list[str]:
    """The words `--set section.field=value` of settings."""
    return [word for setting in settings for word in ("--set", setting)]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
