"""Pictures for papers and READMEs, drawn with matplotlib: a profile, and a finished run.

Pictures of a plan, written with matplotlib (the `report` extra): the simulated timeline, and
predicted beside published step times.
"""

from collections.abc import Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from mtcli.core.plan.published.validate import Scored
from mtcli.core.profile.breakdown import KINDS
from mtcli.core.profile.figures import Profile, memory_over_time
from mtcli.core.profile.finished_run import CURVES
from mtcli.core.profile.render.colors import GREEN, MEMORY, TIME
from mtcli.core.runtime.atomic_writes import aside
from mtcli.core.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    _save_figure(target, figure)


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
    _save_figure(target, figure)


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


def _save_figure(target: str, figure: Any) -> None:
    with aside(target) as path:
        figure.savefig(path, dpi=150)


COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#72b7b2"}
LABELS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def save_timeline(timeline: Timeline, title: str, target: str) -> None:
    """Writes the timeline as a picture, a row per pipeline rank; the suffix says which kind.

    Raises MtcliError (exit 1) where the file cannot be written.
    """
    figure = _figure(12, 1.5 + 0.3 * timeline.num_ranks)
    axes = figure.add_subplot(title=title, xlabel="seconds", ylabel="pipeline rank")
    for kind in sorted({span.op.kind for span in timeline.spans}):
        for rank in range(timeline.num_ranks):
            bars = [
                (span.start, span.end - span.start)
                for span in timeline.spans
                if span.rank == rank and span.op.kind == kind
            ]
            label = LABELS[kind] if rank == 0 else None
            axes.broken_barh(
                bars, (rank - 0.4, 0.8), color=COLORS[kind], edgecolor="white", lw=0.3, label=label
            )
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(LABELS))
    _save(figure, target)


def save_scatter(scored: Sequence[Scored], target: str) -> None:
    """Writes predicted over measured seconds of every run, a colour per source.

    Raises MtcliError as `save_timeline` does.
    """
    figure = _figure(8, 8)
    axes = figure.add_subplot(
        xlabel="published step time, seconds", ylabel="predicted, seconds", aspect="equal"
    )
    timed = [one for one in scored if one.record.seconds]
    for source in sorted({one.record.source for one in timed}):
        mine = [one for one in timed if one.record.source == source]
        seconds = [one.record.seconds or 0.0 for one in mine]
        axes.plot(seconds, [one.seconds for one in mine], ".", ms=5, alpha=0.7, label=source)
    ends = [min((one.record.seconds or 1.0 for one in timed), default=1.0) / 2]
    ends.append(max((one.record.seconds or 1.0 for one in timed), default=1.0) * 2)
    axes.plot(ends, ends, color="black", lw=0.8)
    lower, upper = [0.8 * end for end in ends], [1.2 * end for end in ends]
    axes.fill_between(ends, lower, upper, color="black", alpha=0.08, lw=0, label="within 20 %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.legend(loc="upper left", fontsize="x-small")
    _save(figure, target)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: "Figure", target: str) -> None:
    with aside(target) as path:
        figure.savefig(path, dpi=150)
