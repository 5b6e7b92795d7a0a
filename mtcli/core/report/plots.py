"""Pictures for papers and READMEs, drawn with matplotlib: a profile, and a finished run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtcli.core.cost.plot import COLORS, LABELS
from mtcli.core.report.attribution import KINDS
from mtcli.core.report.figures import Profile
from mtcli.core.report.files import aside
from mtcli.core.report.finished import FinishedRun
from mtcli.core.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")


def save_profile(target: str, profile: Profile) -> None:
    """Writes the planned timeline above the measured one, and the shares of each pipeline rank."""
    from matplotlib.figure import Figure

    ranks = profile.measured.num_ranks
    row = 0.9 + 0.35 * ranks
    figure = Figure(figsize=(11, 3 * row + 0.4), layout="constrained")
    planned, measured, shared = figure.subplots(3, 1)
    end = max(profile.planned.end, profile.measured.end)
    for axes, name, timeline in (
        (planned, "planned", profile.planned),
        (measured, "measured", profile.measured),
    ):
        _draw(axes, timeline)
        axes.set(xlim=(0, end), ylabel="pipeline rank", yticks=range(ranks))
        bubble = f"bubble {timeline.bubble_fraction:.1%} of busy time"
        axes.set_title(f"{name}, {bubble}", loc="left", fontsize=10)
    planned.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    measured.set_xlabel("seconds since the first op of the step")
    _stack(shared, profile.shares_by_rank)
    _save(target, figure)


def save_run(target: str, run: FinishedRun) -> None:
    """Writes loss, gradient norm, tokens/s and MFU over the steps of a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    curves = {
        "loss": ("loss", 1.0),
        "gradient norm": ("grad_norm", 1.0),
        "tokens/s": ("tokens_per_second", 1.0),
        "MFU (%)": ("mfu", 100.0),
    }
    steps = [row["step"] for row in run.rows]
    places = figure.subplots(2, 2, sharex=True)
    for axes, (title, (key, scale)) in zip(places.flat, curves.items(), strict=True):
        axes.plot(steps, [scale * row[key] for row in run.rows], color=COLORS["F"], linewidth=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
    valid = [(row["step"], row["valid_loss"]) for row in run.rows if "valid_loss" in row]
    if valid:
        places.flat[0].plot(*zip(*valid, strict=True), "o-", color=COLORS["B"], label="validation")
        places.flat[0].legend(frameon=False)
    for axes in places[1]:
        axes.set_xlabel("step")
    _save(target, figure)


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
    from matplotlib import colormaps

    left = [0.0] * len(rows)
    for place, kind in enumerate(KINDS):
        widths = [100 * row[kind] for row in rows]
        axes.barh(range(len(rows)), widths, 0.8, left, label=kind, color=colormaps["tab10"](place))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlim=(0, 100), xlabel="% of the step", ylabel="pipeline rank", yticks=range(len(rows)))
    axes.invert_yaxis()
    axes.set_title("where the step goes", loc="left", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def _save(target: str, figure: Any) -> None:
    with aside(target) as path:
        figure.savefig(path, dpi=150)
