"""Draws pictures for papers and READMEs with matplotlib: of profiles, finished runs and plans.

Colours are those of the HTML page too: told apart by colour-blind readers, on light and dark. Blue,
orange and the rest are of Okabe and Ito's set (jfly.uni-koeln.de/color), with greys for idle.
"""

from collections.abc import Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from mtcli.core.profile.breakdown import KINDS
from mtcli.core.profile.curves import CURVES
from mtcli.core.profile.figures import Profile, memory_over_time
from mtcli.core.runtime.atomic_writes import aside
from mtcli.core.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK = "#4c78a8", "#f58518", "#009e73", "#cc79a7"
YELLOW, TEAL, LIGHT, DARK = "#e6c229", "#72b7b2", "#bab0ac", "#7a7a7a"
OPS = {"F": BLUE, "B": ORANGE, "I": ORANGE, "W": TEAL}
LABELS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
TIME = dict(zip(KINDS, (BLUE, ORANGE, PINK, LIGHT, GREEN, YELLOW, DARK), strict=True))
MEMORY = {"weights": BLUE, "gradients": ORANGE, "optimizer": GREEN}
MEMORY |= {"activations": PINK, "temporary": YELLOW, "other": LIGHT}
LEGEND = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False, "fontsize": 8}


def memory_layers(data: Mapping[str, Any]) -> dict[str, list[float]]:
    """MiB by kind over the profiled step, the lowest layer first."""
    return {kind: [size / 2**20 for size in data[kind]] for kind in MEMORY if kind in data}


def save_profile(target: str, profile: Profile) -> None:
    """Writes the planned timeline above the measured one, each rank's shares, and memory."""
    shown = [("measured", profile.measured, profile.measured.bubble_fraction)]
    if profile.planned and profile.prediction:
        shown.insert(0, ("planned", profile.planned, profile.prediction.bubble_fraction))
    ranks = profile.measured.num_ranks
    heights = [0.9 + 0.35 * ranks] * (len(shown) + 1) + [2.4]
    figure = _figure(11, sum(heights) + 0.4)
    *drawn, shared, memory = figure.subplots(len(heights), 1, height_ratios=heights)
    end = max(timeline.end for _, timeline, _ in shown)
    for axes, (name, timeline, bubble) in zip(drawn, shown, strict=True):
        _draw(axes, timeline)
        axes.set(xlim=(0, end), ylabel="pipeline rank", yticks=range(ranks))
        axes.set_title(f"{name}, bubble {bubble:.1%} of busy time", loc="left", fontsize=10)
    drawn[0].legend(**LEGEND)
    drawn[-1].set_xlabel("seconds since the first op of the step")
    _stack(shared, profile.shares_by_rank)
    data = memory_over_time(profile.fullest)
    layers, step = memory_layers(data), data["seconds"]
    colors = [MEMORY[kind] for kind in layers]
    memory.stackplot(step, layers.values(), labels=layers, colors=colors, step="post", linewidth=0)
    memory.set(xlim=(0, step[-1]), ylim=(0, None), ylabel="MiB")
    memory.set_xlabel("seconds of the profiled step")
    memory.set_title(f"memory of rank {data['rank']}", loc="left", fontsize=10)
    memory.legend(**LEGEND, reverse=True)
    _save(figure, target)


def save_run(target: str, data: Mapping[str, Any]) -> None:
    """Writes the curves of a run's summary over its steps."""
    told = data["curves"]
    shown = [name for name in CURVES if name in told]
    height = -(-len(shown) // 2)
    figure = _figure(11, 2.6 * height + 0.4)
    places = figure.subplots(height, 2, sharex=True, squeeze=False)
    for axes, title in zip(places.flat, shown, strict=False):
        axes.plot(told[title]["steps"], _gaps(told[title]), color=BLUE, linewidth=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        for step in data["resumed_at"]:
            axes.axvline(step, color=GREEN, linestyle=":", linewidth=1)
    if valid := told.get("validation loss"):
        first = places.flat[0]
        first.plot(valid["steps"], _gaps(valid), "o-", ms=3, color=ORANGE, label="validation")
        first.legend(frameon=False)
    for axes in places[-1]:
        axes.set_xlabel("step")
    _save(figure, target)


def save_timeline(timeline: Timeline, title: str, target: str) -> None:
    """Writes the timeline as a picture, a row per pipeline rank; the suffix says which kind.

    Raises MtcliError (exit 1) where the file cannot be written.
    """
    figure = _figure(12, 1.5 + 0.3 * timeline.num_ranks)
    axes = figure.add_subplot(title=title, xlabel="seconds", ylabel="pipeline rank")
    _draw(axes, timeline, reverse=False)
    figure.legend(loc="outside lower center", ncols=len(LABELS))
    _save(figure, target)


def _gaps(curve: Mapping[str, Any]) -> list[float]:
    return [nan if value is None else value for value in curve["values"]]


def _draw(axes: "Axes", timeline: Timeline, reverse: bool = True) -> None:
    for kind in sorted({span.op.kind for span in timeline.spans}, reverse=reverse):
        for rank in range(timeline.num_ranks):
            spans = [s for s in timeline.spans if s.rank == rank and s.op.kind == kind]
            axes.broken_barh(
                [(s.start, s.end - s.start) for s in spans],
                (rank - 0.4, 0.8),
                color=OPS[kind],
                edgecolor="white",
                lw=0.3,
                label=LABELS[kind] if rank == 0 else None,
            )
    axes.invert_yaxis()


def _stack(axes: "Axes", rows: Sequence[Mapping[str, float]]) -> None:
    left = [0.0] * len(rows)
    for kind in KINDS:
        widths = [100 * row[kind] for row in rows]
        axes.barh(range(len(rows)), widths, 0.8, left, label=kind, color=TIME[kind])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlim=(0, 100), xlabel="% of the step", ylabel="pipeline rank", yticks=range(len(rows)))
    axes.invert_yaxis()
    axes.set_title("where the step goes", loc="left", fontsize=10)
    axes.legend(**LEGEND)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: "Figure", target: str) -> None:
    with aside(target) as path:
        figure.savefig(path, dpi=150)
