"""Pictures of a plan, written with matplotlib (the `report` extra): the simulated timeline, and
predicted beside published step times.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtcli.core.cost.validate import Scored
from mtcli.core.schedule.timeline import Timeline
from mtcli.core.spec.outputs import aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
