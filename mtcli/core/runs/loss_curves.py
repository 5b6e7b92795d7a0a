"""Reads the loss curves of runs, over steps, tokens and time. Imports no torch."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.errors import collect_errors, wrong
from mtcli.core.profile.curves import Curve, thinned
from mtcli.core.runs.records_tail import number
from mtcli.core.training.run_folder import METRICS, step_records

WINDOWS = 50  # of smoothing in a run, by default


class LossCurves(NamedTuple):
    """A run's training losses at each step that it made, NaN where there was none, and its
    validation losses; `tokens` and `seconds` are those of the run up to each step."""

    folder: Path
    steps: list[float]
    tokens: list[float]
    seconds: list[float]
    losses: list[float]
    valid: dict[int, float]  # index of the step -> validation loss

    def along(self, axis: str) -> list[float]:
        """Returns where each step lies on an axis: its number, tokens, or seconds."""
        return {"steps": self.steps, "tokens": self.tokens, "time": self.seconds}[axis]

    def as_json(self) -> dict[str, Any]:
        """Returns the curves by name, thinned to what a picture shows."""
        every_index = list(range(len(self.steps)))
        indices = thinned(Curve(every_index, self.losses)).steps
        return {
            "folder": str(self.folder),
            **{
                name: [values[index] for index in indices]
                for name, values in (
                    ("steps", self.steps), ("tokens", self.tokens), ("seconds", self.seconds),
                    ("loss", self.losses),
                )
            },
            "valid": [
                {"step": self.steps[index], "tokens": self.tokens[index],
                 "seconds": self.seconds[index], "loss": loss}
                for index, loss in self.valid.items()
            ],
        }  # fmt: skip


def read_curves(folders: Iterable[Path]) -> list[LossCurves]:
    """Reads runs' curves. Raises MtcliError for all runs that have made no step."""
    return collect_errors(*(lambda folder=folder: _curves(folder) for folder in folders))


def _curves(folder: Path) -> LossCurves:
    path = folder / METRICS
    try:
        # Of a step that was run again, the last row counts.
        rows = {row["step"]: row for _, row in step_records(path)} if path.exists() else {}
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "is it a run's?") from None
    if not rows:
        raise wrong(f"{folder} has made no step", f"leave {folder} out, or train it first")
    ordered = [rows[step] for step in sorted(rows)]
    losses = [number(row, "loss") for row in ordered]
    valid = {index: number(row, "valid_loss") for index, row in enumerate(ordered)}
    return LossCurves(
        folder,
        [float(row["step"]) for row in ordered],
        _sums(ordered, "tokens"),
        _sums(ordered, "step_seconds"),
        [math.nan if loss is None else loss for loss in losses],
        {index: loss for index, loss in valid.items() if loss is not None},
    )


def _sums(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return list(accumulate(number(row, key) or 0.0 for row in rows))


def smoothed(values: Sequence[float], window: int = 0) -> list[float]:
    """Returns the mean of the finite values in a window around each one; NaN without any.

    At the steep start the window shrinks on both sides alike, so that the mean does not lag; at the
    end only what lies ahead is missing. `window` is in values; 0 is a WINDOWS-th of all.
    """
    half = (window or len(values) // WINDOWS) // 2
    finite = [math.isfinite(value) for value in values]
    sums = [0.0, *accumulate(v if ok else 0.0 for v, ok in zip(values, finite, strict=True))]
    counts = [0, *accumulate(finite)]
    means = []
    for index in range(len(values)):
        reach = min(half, index)
        first, end = index - reach, min(len(values), index + reach + 1)
        count = counts[end] - counts[first]
        means.append((sums[end] - sums[first]) / count if count else math.nan)
    return means
