"""Defines a prepared task."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.evaluate.requests import Request, Score

Report = dict[str, float | int | None]
Advance = Callable[[int], object]  # told how many more requests are done


class TaskOptions(NamedTuple):
    """The options of a task that a run may change."""

    max_seq_len: int
    limit: int | None = None  # items of each kind; None = all
    overlap: int | None = None  # tokens that wikitext103's windows advance by; None = at most 32


class PreparedTask(NamedTuple):
    """A task ready to be scored: `report` takes one score per request, in request order."""

    num_items: int
    requests: list[Request]
    report: Callable[[Sequence[Score]], Report]


def find_file(path: Path, pattern: str) -> Path:
    """`path`, or the one file in the folder `path` that matches `pattern`.

    Raises MtcliError when there is none, or several.
    """
    if not path.is_dir():
        return path
    found = sorted(path.glob(pattern))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        message = f"{path} holds {len(found)} files like {pattern}, 1 is needed"
        raise wrong(message, f"name the file; found: {names}", "--task")
    return found[0]


def exp(nats: float) -> float:
    """e ** nats, infinite where float64 overflows: a broken model still gets its report."""
    return math.exp(nats) if nats < 709 else math.inf
