"""Pictures for papers and READMEs, drawn with matplotlib: a profile, and a finished run."""

from collections.abc import Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from mtcli.core.cost.plot import COLORS, LABELS
from mtcli.core.report.attribution import KINDS
from mtcli.core.report.colors import GREEN, MEMORY, TIME
from mtcli.core.report.figures import Profile, memory_over_time
from mtcli.core.report.history import CURVES
from mtcli.core.schedule.timeline import Timeline
from mtcli.core.spec.outputs import aside

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_profile(target: str, profile: Profile) -> None:
    """Writes the planned timeline above the measured one, each rank's shares, and memory."""
    from matplotlib.figure import Figure

    shown = [("measured", profile.measured, profile.measured.bubble_fraction)]
    if profile.planned and profile.prediction:
        shown.insert(0, ("planned", profile.planned, profile.prediction.bubble_fraction))
    ranks = profile.measured.num_ranks
    row = 0.9 + 0.35 * ranks
    heights = [row] * (len(shown) + 1) + [2.4]
    figure = Figure(figsize=(11, sum(heights) + 0.4), layout="constrained")
    *drawn, shared, held = figure.subplots(len(heights), 1, height_ratios=heights)
    end = max(timeline.end for _, timeline, _ in shown)
    for axes, (name, timeline, bubble) in zip(drawn, shown, strict=True):
        _draw(axes, timeline)
        axes.set(xlim=(0, end), ylabel="pipeline rank", yticks=range(ranks))
        axes.set_title(f"{name}, bubble {bubble:.1%} of busy time", loc="left", fontsize=10)
    drawn[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    drawn[-1].set_xlabel("seconds since the first op of the step")
    _stack(shared, profile.shares_by_rank)
    _layers(held, memory_over_time(profile.fullest))
    _save(target, figure)


def save_run(target: str, data: Mapping[str, Any]) -> None:
    """Writes the curves of a run's summary over its steps."""
    from matplotlib.figure import Figure

    told = data["curves"]
    shown = [name for name in CURVES if name in told]
    height = -(-len(shown) // 2)
    figure = Figure(figsize=(11, 2.6 * height + 0.4), layout="constrained")
    places = figure.subplots(height, 2, sharex=True, squeeze=False)
    for axes, title in zip(places.flat, shown, strict=False):
        axes.plot(told[title]["steps"], _gaps(told[title]), color=COLORS["F"], linewidth=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        for step in data["resumed_at"]:
            axes.axvline(step, color=GREEN, linestyle=":", linewidth=1)
    valid = told.get("validation loss")
    if valid:
        places.flat[0].plot(
            valid["steps"], _gaps(valid), "o-", ms=3, color=COLORS["B"], label="validation"
        )
        places.flat[0].legend(frameon=False)
    for axes in places[-1]:
        axes.set_xlabel("step")
    _save(target, figure)


def _gaps(curve: Mapping[str, Any]) -> list[float]:
    return [nan if value is None else value for value in curve["values"]]


def _draw(axes: "Axes", timeline: Timeline) -> None:
    for kind in sorted({span.op.kind for span in timeline.spans}, reverse=True):
        for rank in range(timeline.num_ranks):
            spans = [s for s in timeline.spans if s.rank == rank and s.op.kind == kind]
            bars = [(s.start, s.end - s.start) for s in spans]
            label = LABELS[kind] if rank == 0 else None
            axes.broken_barh(
                bars, (rank - 0.4, 0.8), color=COLORS[kind], edgecolor="white", lw=0.3, label=label
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
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def _layers(axes: "Axes", data: Mapping[str, Any]) -> None:
    """MiB by kind over the profiled step, one on top of the other."""
    kinds = [kind for kind in MEMORY if kind in data]
    layers = [[held / 2**20 for held in data[kind]] for kind in kinds]
    colors = [MEMORY[kind] for kind in kinds]
    axes.stackplot(data["seconds"], layers, labels=kinds, colors=colors, step="post", linewidth=0)
    axes.set(xlim=(0, data["seconds"][-1]), ylim=(0, None), ylabel="MiB")
    axes.set_xlabel("seconds of the profiled step")
    axes.set_title(f"memory of rank {data['rank']}", loc="left", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, reverse=True)


def _save(target: str, figure: Any) -> None:
    with aside(target) as path:
        figure.savefig(path, dpi=150)
