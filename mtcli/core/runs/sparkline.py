"""Draws a curve as one line of text. Imports no torch."""

import math
from collections.abc import Sequence

LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, top: float | None = None) -> str:
    """Returns a curve as at most `width` characters, from its least value to its highest, or to
    `top`; a blank where no value is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * min(width, len(values))
    low, high = min(finite), max(finite) if top is None or not math.isfinite(top) else top
    count = min(width, len(values))
    bounds = [len(values) * index // count for index in range(count + 1)]
    return "".join(
        _level(values[first:end], low, high) for first, end in zip(bounds, bounds[1:], strict=False)
    )


def _level(part: Sequence[float], low: float, high: float) -> str:
    finite = [value for value in part if math.isfinite(value)]
    if not finite:
        return " "
    share = (sum(finite) / len(finite) - low) / (high - low) if high > low else 0.0
    return LEVELS[min(len(LEVELS) - 1, int(share * len(LEVELS)))]
