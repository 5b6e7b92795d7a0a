"""Reduces the metrics of a run's steps for drawing: thinned curves, quantiles, histograms."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
MOST_POINTS = 2000  # of a curve in a page: more than a screen has columns
BINS = 40
MFU = "MFU (%)"
CURVES = {  # name: (key in metrics.jsonl, factor to the unit)
    "loss": ("loss", 1.0),
    "gradient norm": ("grad_norm", 1.0),
    "learning rate": ("lr", 1.0),
    "tokens/s": ("tokens_per_second", 1.0),
    MFU: ("mfu", 100.0),
    "step time (s)": ("step_seconds", 1.0),
}
VALIDATION = "validation loss"  # and of each set, with its name behind it

TASKS = "eval/"  # begins the name of a task's figure


class Curve(NamedTuple):
    """A curve: values at steps, in order."""

    steps: list[int]
    values: list[float]


def curve(rows: Sequence[Row], key: str, scale: float = 1.0) -> Curve:
    """A metric over the rows that have it."""
    points = [(row["step"], scale * row[key]) for row in rows if key in row]
    return Curve([step for step, _ in points], [value for _, value in points])


def thinned(full_curve: Curve, points: int = MOST_POINTS) -> Curve:
    """Thins a curve to about `points`: the lowest and highest of each stretch, so no spike is lost.

    A stretch without a finite value keeps its first step.
    """
    stride = -(-len(full_curve.steps) // (points // 2))
    if stride <= 2:
        return full_curve
    indices: list[int] = []
    for start in range(0, len(full_curve.steps), stride):
        places = range(start, min(start + stride, len(full_curve.steps)))
        finite = [p for p in places if math.isfinite(full_curve.values[p])] or [start]
        indices += [f(finite, key=full_curve.values.__getitem__) for f in (min, max)]
    indices = sorted({0, *indices, len(full_curve.steps) - 1})
    return Curve([full_curve.steps[p] for p in indices], [full_curve.values[p] for p in indices])


def curves_of(rows: Sequence[Row]) -> dict[str, dict[str, list[Any]]]:
    """Curves to draw, thinned, as {curve: {steps, values}}; None where a value is not finite."""
    curves = {name: thinned(curve(rows, *source)) for name, source in CURVES.items()}
    names = sorted({key for row in rows for key in row if key.startswith("valid_loss")})
    for key in names:
        curves[f"{VALIDATION} {key.partition('/')[2]}".rstrip()] = thinned(curve(rows, key))
    for key in sorted({key for row in rows for key in row if key.startswith(TASKS)}):
        curves[key] = thinned(curve(rows, key))
    return {
        name: {
            "steps": line.steps,
            "values": [value if math.isfinite(value) else None for value in line.values],
        }
        for name, line in curves.items()
        if any(map(math.isfinite, line.values))
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """{p5, p50, p95} of values, each one that occurs."""
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (5, 50, 95)}


def histogram(values: Sequence[float]) -> tuple[list[float], list[int], float]:
    """(left ends, counts, width) of BINS bins up to the 99th percentile; the last takes the rest.

    Bins of equal width, from the least value.
    """
    ordered = sorted(values)
    low, high = ordered[0], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    width = (high - low) / BINS or max(abs(low), 1.0) * 1e-3
    counts = [0] * BINS
    for value in ordered:
        counts[min(BINS - 1, int((value - low) / width))] += 1
    return [low + index * width for index in range(BINS)], counts, width
