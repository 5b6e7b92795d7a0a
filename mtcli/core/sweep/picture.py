"""The picture of a sweep: every trial's curve, and the loss against each field that was varied."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtcli.core.profile.render.drawing import INK, LIGHT, Chart, save
from mtcli.core.sweep.record import AVERAGED, TrialRecord
from mtcli.core.sweep.settings import SEED, settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "sweep.png"
SMOOTHED = 50  # means that a curve is drawn from, at most
WIDTH, HEIGHT, COLUMNS = 5.2, 4.0, 3  # inches of a panel, and panels in a row
MOST_TICKS = 5  # of an axis that names each value
MOST_NAMES = 60  # of trials in the legend
LINE, LETTER, SAMPLE = 0.16, 0.065, 0.6  # inches of a name's height, letter and line in the legend
LETTERS = 60  # of a trial's name there
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))  # in turn, so that curves that coincide are both there


def save_picture(target: Path, records: Sequence[TrialRecord], fields: Sequence[str]) -> None:
    """Draws trials that have any loss, and a panel for each field that has several values; needs
    the `report` extra."""
    ranked = sorted((record for record in records if record.losses), key=lambda r: r.order)
    fields = [name for name in fields if len({r.trial.values.get(name) for r in records}) > 1]
    fields = [name for name in fields if name != SEED] or fields
    columns = min(COLUMNS, 1 + len(fields))
    names = [_label(record) for record in ranked[:MOST_NAMES]]
    widest = SAMPLE + LETTER * max(map(len, names), default=0)
    in_row = max(1, int(WIDTH * columns / widest))
    height = HEIGHT + LINE * -(-len(names) // in_row)
    draw = partial(_curves, ranked=ranked, in_row=in_row)
    charts = [Chart(height, draw, "curves, the best dark")]
    for field in fields:
        draw = partial(_against, ranked=ranked, field=field, joined=len(fields) == 1)
        charts.append(Chart(height, draw))
    save(target, charts, columns, WIDTH * columns)


def _label(record: TrialRecord) -> str:
    """The name of a trial in the legend, with how it ended where that was early."""
    name = record.name[:LETTERS]
    if record.status == "stopped":
        return f"{name}, stopped at {len(record.losses)}"
    return f"{name}, diverged" if record.status == "diverged" else name


def _curves(axes: "Axes", ranked: Sequence[TrialRecord], in_row: int) -> None:
    """The curves by their rank, the best one on top, all named, `in_row` names in a row. A cross
    ends a diverged one, and a ring one that was stopped early."""
    colors = _colors(ranked)
    for index, record in reversed(list(enumerate(ranked))):
        steps, losses = _means(record.losses)
        look: dict[str, Any] = {"color": colors[record.name], "lw": 2.2 if index == 0 else 1.3}
        if marker := {"diverged": "x", "stopped": "o"}.get(record.status):
            look |= {"marker": marker, "markevery": [-1], "mfc": "none"}
        label = _label(record) if index < MOST_NAMES else None
        axes.plot(steps, losses, ls=DASHES[index % len(DASHES)], label=label, **look)
    finite = [x for record in ranked for x in record.losses if math.isfinite(x)]
    highest = max((record.losses[0] for record in ranked), default=1.0)
    if finite:  # what is above the start by more leaves the picture
        axes.set_ylim(min(finite) * 0.98, min(max(finite), 1.08 * highest) * 1.02)
    axes.set(xlabel="step", ylabel="training loss")
    handles, labels = axes.get_legend_handles_labels()
    more = f"the best {MOST_NAMES} of {len(ranked)}" if len(ranked) > MOST_NAMES else None
    look = {"ncols": in_row, "title": more, "fontsize": 7, "alignment": "left"}
    figure = axes.get_figure()
    assert figure is not None, "a chart is drawn in a figure"
    figure.legend(handles[::-1], labels[::-1], loc="outside lower left", **look)


def _against(axes: "Axes", ranked: Sequence[TrialRecord], field: str, joined: bool) -> None:
    """The final loss of each trial at its value of a field, in its curve's colour; a ring marks the
    best, crosses those that diverged, and rings those that were stopped early.

    Where no other field but the seed varies a line is `joined` through the finished ones, or
    through the means of seeds, with their standard deviations.
    """
    shown = [record for record in ranked if field in record.trial.values]
    values = [record.trial.values[field] for record in shown]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    order = sorted({*values}, key=float if numeric else str)
    places = {v: v if numeric else at for at, v in enumerate(order)}
    ended = [r for r in shown if r.status != "diverged" and math.isfinite(r.score)]
    stopped = [r for r in ended if r.status == "stopped"]
    whole = [r for r in ended if r.status != "stopped"]
    colors = _colors(ranked)

    def spots(records: Sequence[TrialRecord]) -> tuple[list[float], list[float]]:
        return [places[r.trial.values[field]] for r in records], [r.score for r in records]

    settings = settings_of(shown) if joined and field != SEED else []
    spreads = [(places[s.values[field]], s.valid_loss or s.loss) for s in settings if s.finished]
    if spreads:
        at, means = zip(*sorted((x, y) for x, y in spreads if y), strict=True)
        bars = [one.std or 0.0 for one in means]
        look: dict[str, Any] = {"color": INK, "lw": 1, "capsize": 6, "zorder": 3}
        axes.errorbar(at, [one.mean for one in means], bars, label="mean ± std", **look)
    elif joined:
        axes.plot(*zip(*sorted(zip(*spots(whole), strict=True)), strict=True), color=LIGHT, lw=1)
    # The best ones small and on top: of those in one place each is seen around the next.
    sizes = [24 + 70 * index / max(1, len(whole) - 1) for index in range(len(whole))]
    look = {"c": [colors[r.name] for r in whole[::-1]], "s": sizes[::-1]}
    at, scores = spots(whole[::-1])
    axes.scatter(at, scores, edgecolors="white", linewidths=0.6, zorder=2, **look)
    if stopped:
        look = {"edgecolors": [colors[r.name] for r in stopped], "label": "stopped early"}
        axes.scatter(*spots(stopped), s=24, facecolors="none", linewidths=1, zorder=2, **look)
    if whole:
        (x,), (y,) = spots(whole[:1])
        best = f"best: {_words(whole[0].trial.values[field])}"
        axes.plot(x, y, "o", ms=11, mfc="none", color=colors[whole[0].name], label=best)
    diverged = [places[r.trial.values[field]] for r in shown if r.status == "diverged"]
    if diverged:
        top = max((r.score for r in ended), default=1.0)
        axes.plot(diverged, [top] * len(diverged), "x", color="#d62728", label="diverged")
    if ended or diverged:
        axes.legend()
    _mark_values(axes, places, numeric)
    named = "validation loss"
    if all(r.valid_loss is None for r in shown):
        named = f"mean loss of the last {AVERAGED} steps"
    axes.set(xlabel=field, ylabel=named)


def _mark_values(axes: "Axes", places: Mapping[Any, Any], numeric: bool) -> None:
    """Scales the axis of a field whose values are at `places`, and names each of a few."""
    if numeric and places and _spans_decades(list(places)):
        axes.set_xscale("log")
    if not numeric or len(places) <= MOST_TICKS:
        axes.set_xticks(list(places.values()), [_words(value) for value in places])
        axes.set_xticks([], minor=True)


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
