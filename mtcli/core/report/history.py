"""A finished run as a curve: its steps in order, those run twice once, thinned to be drawn."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

MOST_POINTS = 2000  # of a curve in a page: more than a screen has columns
BINS = 40
CURVES = {  # (key in metrics.jsonl, unit times)
    "loss": ("loss", 1.0),
    "gradient norm": ("grad_norm", 1.0),
    "learning rate": ("lr", 1.0),
    "tokens/s": ("tokens_per_second", 1.0),
    "MFU (%)": ("mfu", 100.0),
    "step time (s)": ("step_seconds", 1.0),
}


class Curve(NamedTuple):
    """Values at steps, in order."""

    steps: list[int]
    values: list[float]


def once(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """(every step once, as it was run last, in order; the steps at which the run took up again).

    A run that resumes from a checkpoint runs the steps since then a second time.
    """
    steps = [row["step"] for row in rows]
    again = [b for a, b in zip(steps, steps[1:], strict=False) if b <= a]
    last = {row["step"]: row for row in rows}
    return [last[step] for step in sorted(last)], again


def curve(rows: Sequence[Row], key: str, scale: float = 1.0) -> Curve:
    """A metric over the rows that have it."""
    found = [(row["step"], scale * row[key]) for row in rows if key in row]
    return Curve([step for step, _ in found], [value for _, value in found])


def thinned(whole: Curve, points: int = MOST_POINTS) -> Curve:
    """At most about `points` of a curve: of each stretch its lowest and highest, in order.

    So no spike is lost. Steps without a finite value are kept where a stretch has no other.
    """
    stride = -(-len(whole.steps) // (points // 2))
    if stride <= 2:
        return whole
    kept: list[int] = []
    for start in range(0, len(whole.steps), stride):
        places = range(start, min(start + stride, len(whole.steps)))
        finite = [p for p in places if math.isfinite(whole.values[p])] or [start]
        kept += [f(finite, key=whole.values.__getitem__) for f in (min, max)]
    kept = sorted({0, *kept, len(whole.steps) - 1})
    return Curve([whole.steps[p] for p in kept], [whole.values[p] for p in kept])


def curves_of(rows: Sequence[Row]) -> dict[str, dict[str, list[Any]]]:
    """{curve: {steps, values}} of all that is drawn, thinned; None where a value is not finite."""
    found = {name: thinned(curve(rows, *of)) for name, of in CURVES.items()}
    found["validation loss"] = thinned(curve(rows, "valid_loss"))
    return {
        name: {
            "steps": one.steps,
            "values": [value if math.isfinite(value) else None for value in one.values],
        }
        for name, one in found.items()
        if one.steps
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
    return [low + place * width for place in range(BINS)], counts, width
