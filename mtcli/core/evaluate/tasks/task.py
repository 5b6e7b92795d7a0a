"""Defines a prepared task, and one that is bound to a model."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.evaluate.loglikelihood import Request, Score

Report = dict[str, Any]  # numbers, None for what there is none of, and what they were made of
Record = dict[str, Any]  # of one item, as JSON
ShotsPer = Literal["item", "task", "lm-eval"]  # whom one draw of shots is for
Advance = Callable[[int], object]  # told how many more requests are done


class TaskOptions(NamedTuple):
    """The options of a task that a run may change."""

    max_seq_len: int
    limit: int | None = None  # items of each kind; None = all
    overlap: int | None = None  # tokens that wikitext103's windows advance by; None = at most 32
    shots: int = 0  # examples before each item
    shots_per: ShotsPer = "item"
    seed: int = 1234  # of their draw
    contaminated: frozenset[tuple[str, ...]] | None = None  # n-grams that a corpus contained


class PreparedTask(NamedTuple):
    """A task ready to be scored: `report` takes one score per request, in request order.

    Item i has the requests from ends[i - 1] to ends[i]; `record(i, their scores)` is its line in
    the file of items. `hashes` identify the items' contents.
    """

    num_items: int
    requests: list[Request]
    report: Callable[[Sequence[Score]], Report]
    ends: list[int]
    hashes: list[str]
    record: Callable[[int, Sequence[Score]], Record]


class TaskRun(NamedTuple):
    """A task bound to a model, ready to run."""

    name: str
    summary: str  # what it will do, in numbers
    num_requests: int | None  # None: lm-eval decides while it runs
    run: Callable[[Advance], Report]


def find_file(path: Path, pattern: str) -> Path:
    """Returns `path`, or the only file in the folder `path` that matches `pattern`.

    Raises MtcliError where there is none, or several.
    """
    if not path.is_dir():
        return path
    matches = sorted(path.glob(pattern))
    if len(matches) != 1:
        names = ", ".join(file.name for file in matches) or "none"
        message = f"{path} holds {len(matches)} files like {pattern}, 1 is needed"
        raise wrong(message, f"name the file; found: {names}", "--task")
    return matches[0]


def part_report(name: str, right: Sequence[bool]) -> Report:
    """Reports the accuracy of a part of the items, None without items, and their number."""
    return {name: sum(right) / len(right) if right else None, f"{name}_total": len(right)}


def exp(nats: float) -> float:
    """Returns e ** nats, or infinity on overflow, so that a broken model still gets its report."""
    return math.exp(nats) if nats < 709 else math.inf
