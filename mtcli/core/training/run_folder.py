"""Names the files of a run folder, and finds its run and its steps. Imports no torch."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtcli.core.checkpoint.folder import CHECKPOINTS, step_folders
from mtcli.core.config.untrusted import parse_json, read_untrusted
from mtcli.core.runtime.outputs import require_no_link

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"  # what happens besides steps: saves, resuming
TENSORBOARD = "events"  # the folder of that tracker's files
SUBSETS = "subsets"  # the folder of core-sets that a run selects on its way
FACTS = "run.json"  # what a config does not say: the world, and which launch it is


def require_own_folders(folder: Path) -> None:
    """Raises MtcliError where a folder in a run's folder is a link."""
    for name in (CHECKPOINTS, TENSORBOARD, SUBSETS, "wandb"):
        require_no_link(folder / name, "train.output")


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder."""
    traces = (folder / METRICS, folder / FACTS)
    return any(path.exists() for path in traces) or bool(step_folders(folder / CHECKPOINTS))


def newest_saved(folder: Path) -> str:
    """Says which checkpoint a run folder has."""
    saved = step_folders(folder / CHECKPOINTS)
    return f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint is saved yet"


def how_it_goes_on(folder: Path, command: str = "run the same command with") -> str:
    """Advises how to go on after a fault or a stop."""
    anew = not step_folders(folder / CHECKPOINTS) and last_step(folder / METRICS)
    flag = "--start-over" if anew else "--resume"
    return f"{newest_saved(folder)}: {command} {flag}"


def last_step(path: Path) -> int:
    """The last step in a metrics file; 0 where there is none."""
    records = step_records(path) if path.is_file() else ()
    return max((record["step"] for _, record in records), default=0)


def step_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (line, record) of the lines of METRICS or EVENTS that have a step; a line that a
    killed run left unfinished is skipped."""
    yield from records_in(read_untrusted(path))


def records_in(data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lines of a part of METRICS or EVENTS, as `step_records` does of all of it."""
    for line in data.decode(errors="replace").splitlines():
        with suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield line, record
