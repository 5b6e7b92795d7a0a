"""Draws runs' losses over steps, tokens or time: smoothed, with every step lightly behind."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from mtcli.core.profile.curves import Curve, thinned
from mtcli.core.profile.render.drawing import (
    BLUE,
    DARK,
    GREEN,
    ORANGE,
    PINK,
    TEAL,
    YELLOW,
    Chart,
)
from mtcli.core.runs.loss_curves import LossCurves, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (BLUE, ORANGE, GREEN, PINK, TEAL, YELLOW, DARK)
# Of each run the next, so that equal curves are all seen; 28 pairs with the colours.
DASHES = ("-", "--", ":", "-.")
HEIGHT, LINE = 4.2, 0.19  # inches of a chart, and of a name in its legend
MOST_RAW = 12  # runs whose every step is drawn too
ABOVE_START = 1.08  # times the first loss: what is higher leaves the picture
TIMES = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


class Look(NamedTuple):
    """How runs are drawn: the names of the legend, and steps in a mean (0: by their number)."""

    names: Sequence[str]
    window: int = 0


def loss_chart(curves: Sequence[LossCurves], axis: str, look: Look) -> Chart:
    """Draws training and validation losses over an axis, with a legend that names every run."""
    height = max(HEIGHT, 1.0 + LINE * len(curves))
    return Chart(height, partial(_draw, curves=curves, axis=axis, look=look))


def _draw(axes: "Axes", curves: Sequence[LossCurves], axis: str, look: Look) -> None:
    unit, scale = _unit(curves, axis)
    styles = zip(cycle(COLORS), cycle(DASHES), strict=False)
    for run, name, (color, dash) in zip(curves, look.names, styles, strict=False):
        line: dict[str, Any] = {"color": color, "linestyle": dash}
        xs = [x / scale for x in run.along(axis)]
        means = smoothed(run.losses, look.window)
        if len(curves) <= MOST_RAW:
            axes.plot(*_points(xs, run.losses), color=color, linewidth=0.7, alpha=0.25)
        mark = "o" if len(xs) == 1 else ""
        axes.plot(*_points(xs, means), linewidth=1.6, label=name, marker=mark, **line)
        if run.valid:
            at = [xs[index] for index in run.valid]
            look_of_dots: dict[str, Any] = {"color": color, "linestyle": "", "markersize": 4.5}
            axes.plot(at, list(run.valid.values()), marker="o", **look_of_dots)
    _limit(axes, curves)
    if axis == "tokens":
        from matplotlib.ticker import FuncFormatter

        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_words(value)))
    dots = "; dots: validation" if any(run.valid for run in curves) else ""
    axes.set(xlabel=unit, ylabel=f"loss{dots}")
    axes.grid()
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def _points(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Thins a curve to what a picture shows, without losing a spike."""
    shown = thinned(Curve(list(range(len(ys))), list(ys)))
    return [xs[index] for index in shown.steps], shown.values


def _limit(axes: "Axes", curves: Sequence[LossCurves]) -> None:
    """Leaves out what is above the start: a run that diverges would flatten all others."""
    losses = [loss for run in curves for loss in run.losses if math.isfinite(loss)]
    firsts = [next((x for x in run.losses if math.isfinite(x)), 0.0) for run in curves]
    valid = [loss for run in curves for loss in run.valid.values()]
    if losses:
        low = min([*losses, *valid])
        high = min(max([*losses, *valid]), ABOVE_START * max(firsts))
        margin = 0.03 * (high - low) or 0.1
        axes.set_ylim(low - margin, max(high, low) + margin)


def _unit(curves: Sequence[LossCurves], axis: str) -> tuple[str, float]:
    """Returns (label of an axis, what its values are divided by)."""
    if axis != "time":
        return {"steps": "step", "tokens": "tokens"}[axis], 1.0
    longest = max(run.seconds[-1] for run in curves)
    unit, scale = next(pair for pair in TIMES if longest >= 2 * pair[1] or pair[1] == 1.0)
    return f"{unit} of training steps", scale


def count_words(value: float) -> str:
    """Words a count in thousands, millions and so on, such as 1.5M."""
    for suffix in ("", "K", "M", "B"):
        if abs(value) < 999.5:
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.4g}T"
