"""The picture of a sweep: every trial's curve, and the loss against each field that was varied."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtcli.core.profile.render.drawing import Chart, save
from mtcli.core.sweep.record import AVERAGED, TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "sweep.png"
SMOOTHED = 50  # means that a curve is drawn from, at most
WIDTH, HEIGHT, COLUMNS = 5.2, 4.0, 3  # inches of a panel, and panels in a row
MOST_TICKS = 5  # of an axis that names each value
MOST_NAMES, NAMES_OF_COLUMN = 60, 20  # of trials in the legend, and in each column of it
LINE = 0.16  # inches of a name
LETTERS = 60  # of a trial's name there
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))  # in turn, so that curves that coincide are both there


def save_picture(target: Path, records: Sequence[TrialRecord], fields: Sequence[str]) -> None:
    """Draws trials that have any loss, and a panel for each field that has several values; needs
    the `report` extra."""
    ranked = sorted((record for record in records if record.losses), key=lambda r: r.order)
    fields = [name for name in fields if len({r.trial.values.get(name) for r in records}) > 1]
    height = HEIGHT + LINE * min(len(ranked), NAMES_OF_COLUMN)
    charts = [Chart(height, partial(_curves, ranked=ranked), "curves, the best dark")]
    for field in fields:
        draw = partial(_against, ranked=ranked, field=field, joined=len(fields) == 1)
        charts.append(Chart(HEIGHT, draw))
    columns = min(COLUMNS, len(charts))
    save(target, charts, columns, WIDTH * columns)


def _curves(axes: "Axes", ranked: Sequence[TrialRecord]) -> None:
    """The curves by their rank, the best one on top, all named; diverged ones end in a cross."""
    colors = _colors(ranked)
    for index, record in reversed(list(enumerate(ranked))):
        steps, losses = _means(record.losses)
        look: dict[str, Any] = {"color": colors[record.name], "lw": 2.2 if index == 0 else 1.3}
        label = record.name[:LETTERS] if index < MOST_NAMES else None
        if record.status == "diverged":
            label = f"{label}, diverged" if label else None
            look |= {"marker": "x", "markevery": [-1]}
        axes.plot(steps, losses, ls=DASHES[index % len(DASHES)], label=label, **look)
    finite = [x for record in ranked for x in record.losses if math.isfinite(x)]
    highest = max((record.losses[0] for record in ranked), default=1.0)
    if finite:  # what is above the start by more leaves the picture
        axes.set_ylim(min(finite) * 0.98, min(max(finite), 1.08 * highest) * 1.02)
    axes.set(xlabel="step", ylabel="training loss")
    handles, labels = axes.get_legend_handles_labels()
    columns = -(-len(labels) // NAMES_OF_COLUMN) or 1
    more = f"the best {MOST_NAMES} of {len(ranked)}" if len(ranked) > MOST_NAMES else None
    axes.legend(
        handles[::-1],
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(0.0, -0.14),
        ncols=columns,
        title=more,
        fontsize=7,
    )


def _against(axes: "Axes", ranked: Sequence[TrialRecord], field: str, joined: bool) -> None:
    """The final loss of each trial at its value of a field, in its curve's colour, `joined` where
    no other field varies; a ring marks the best, and crosses those that diverged."""
    shown = [record for record in ranked if field in record.trial.values]
    values = [record.trial.values[field] for record in shown]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    order = sorted({*values}, key=float if numeric else str)
    places = {v: v if numeric else at for at, v in enumerate(order)}
    ended = [r for r in shown if r.status != "diverged" and math.isfinite(r.score)]
    at, scores = [places[r.trial.values[field]] for r in ended], [r.score for r in ended]
    colors = _colors(ranked)
    if joined:
        axes.plot(*zip(*sorted(zip(at, scores, strict=True)), strict=True), color="0.8", lw=1)
    # The best ones small and on top: of those in one place each is seen around the next.
    sizes = [24 + 70 * index / max(1, len(ended) - 1) for index in range(len(ended))]
    look: dict[str, Any] = {"c": [colors[r.name] for r in ended[::-1]], "s": sizes[::-1]}
    axes.scatter(at[::-1], scores[::-1], edgecolors="white", linewidths=0.6, zorder=2, **look)
    if ended:
        best = f"best: {_words(ended[0].trial.values[field])}"
        axes.plot(at[0], scores[0], "o", ms=11, mfc="none", color=colors[ended[0].name], label=best)
    diverged = [places[r.trial.values[field]] for r in shown if r.status == "diverged"]
    if diverged:
        top = max(scores, default=1.0)
        axes.plot(diverged, [top] * len(diverged), "x", color="#d62728", label="diverged")
    if ended or diverged:
        axes.legend()
    if numeric and order and _spans_decades(order):
        axes.set_xscale("log")
    if not numeric or len(order) <= MOST_TICKS:
        axes.set_xticks([places[v] for v in order], [_words(v) for v in order])
        axes.set_xticks([], minor=True)
    named = "validation loss"
    if all(r.valid_loss is None for r in shown):
        named = f"mean loss of the last {AVERAGED} steps"
    axes.set(xlabel=field, ylabel=named)


def _colors(ranked: Sequence[TrialRecord]) -> dict[str, Any]:
    """The colours of trials by name, from the best one's dark to the last one's light."""
    from matplotlib import colormaps

    last = max(1, len(ranked) - 1)
    return {r.name: colormaps["viridis"](0.9 * at / last) for at, r in enumerate(ranked)}


def _words(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _spans_decades(order: Sequence[float]) -> bool:
    return order[0] > 0 and order[-1] >= 10 * order[0]


def _means(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Steps and mean losses of runs of steps of equal lengths."""
    size = -(-len(losses) // SMOOTHED)
    parts = [losses[first : first + size] for first in range(0, len(losses), size)]
    ends = [min(first + size, len(losses)) for first in range(0, len(losses), size)]
    return [float(end) for end in ends], [sum(part) / len(part) for part in parts]
