"""The picture of a sweep: every trial's curve, and the loss against each field that was varied."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtcli.core.runtime.atomic_writes import aside
from mtcli.core.sweep.record import TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "sweep.png"
SMOOTHED = 50  # means that a curve is drawn from, at most
COLUMNS = 3


def save_picture(target: Path, records: Sequence[TrialRecord], fields: Sequence[str]) -> None:
    """Draws trials that have any loss; needs the `report` extra."""
    from matplotlib.figure import Figure

    shown = [record for record in records if record.losses]
    panels = 1 + len(fields)
    columns = min(COLUMNS, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(5.2 * columns, 4.0 * lines), layout="constrained")
    axes = [figure.add_subplot(lines, columns, place + 1) for place in range(panels)]
    _curves(axes[0], shown)
    for panel, field in zip(axes[1:], fields, strict=True):
        _against(panel, shown, field)
    with aside(target) as path:
        figure.savefig(path, dpi=110)


def _curves(axes: "Axes", records: Sequence[TrialRecord]) -> None:
    """The curves by their rank, the best one on top and named; diverged ones dashed."""
    from matplotlib import colormaps

    ranked = sorted(records, key=lambda record: record.order)
    for place, record in reversed(list(enumerate(ranked))):
        steps, losses = _means(record.losses)
        share = place / max(1, len(ranked) - 1)
        label = record.name if place in (0, len(ranked) - 1) else None
        style = "--" if record.status == "diverged" else "-"
        color = colormaps["viridis"](0.9 * share)
        axes.plot(steps, losses, style, color=color, lw=2.2 if place == 0 else 1.1, label=label)
    finite = [x for record in records for x in record.losses if math.isfinite(x)]
    highest = max((record.losses[0] for record in records), default=1.0)
    if finite:
        axes.set_ylim(min(finite) * 0.95, min(max(finite), 1.3 * highest) * 1.05)
    axes.set(xlabel="step", ylabel="training loss")
    axes.set_title("curves, the best dark", loc="left", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8)


def _against(axes: "Axes", records: Sequence[TrialRecord], field: str) -> None:
    """The final loss of each trial at its value of a field; crosses mark those that diverged."""
    known = [record for record in records if field in record.trial.values]
    values = [record.trial.values[field] for record in known]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    order = sorted({*values}, key=float if numeric else str)
    places = {v: v if numeric else at for at, v in enumerate(order)}
    ended = [r for r in known if r.status != "diverged" and math.isfinite(r.score)]
    axes.plot([places[r.trial.values[field]] for r in ended], [r.score for r in ended], "o", ms=5)
    scores = [r.score for r in ended]
    diverged = [places[r.trial.values[field]] for r in known if r.status == "diverged"]
    if diverged:
        top = max(scores, default=1.0)
        axes.plot(diverged, [top] * len(diverged), "x", color="#d62728", label="diverged")
        axes.legend(frameon=False, fontsize=8)
    if numeric and order and _spans_decades(order):
        axes.set_xscale("log")
    if not numeric:
        axes.set_xticks(range(len(order)), [str(v) for v in order])
    named = "validation loss" if any(r.valid_loss is not None for r in known) else "final loss"
    axes.set(xlabel=field, ylabel=named)


def _spans_decades(order: Sequence[Any]) -> bool:
    return order[0] > 0 and order[-1] >= 10 * order[0]


def _means(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Steps and mean losses of runs of steps of equal lengths."""
    size = -(-len(losses) // SMOOTHED)
    parts = [losses[first : first + size] for first in range(0, len(losses), size)]
    ends = [min(first + size, len(losses)) for first in range(0, len(losses), size)]
    return [float(end) for end in ends], [sum(part) / len(part) for part in parts]
