"""Writes pictures for papers and READMEs: of profiles, finished runs and plans."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtcli.core.profile.figures import Profile, memory_over_time
from mtcli.core.profile.render import charts
from mtcli.core.profile.render.drawing import Chart, save
from mtcli.core.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mtcli.core.plan.published.validate import Scored


def save_profile(target: str, profile: Profile) -> None:
    """Writes the planned timeline over the measured one, each rank's shares, and memory."""
    timelines, bubbles = {}, []
    if profile.planned and profile.prediction:
        timelines["planned"] = profile.planned
        bubbles.append(f"planned {profile.prediction.bubble_fraction:.1%}")
    timelines["measured"] = profile.measured
    bubbles.append(f"measured {profile.measured.bubble_fraction:.1%}")
    rows = [{"label": f"rank {n}", **row} for n, row in enumerate(profile.shares_by_rank)]
    data = memory_over_time(profile.fullest)
    titled = {
        f"bubble over busy time: {', '.join(bubbles)}": charts.gantt(timelines),
        "where the step goes": charts.stacked_shares(rows, charts.TIME_KINDS),
        f"memory of rank {data['rank']}": charts.over_time(data),
    }
    save(target, [chart._replace(title=title) for title, chart in titled.items()])


def save_run(target: str, data: Mapping[str, Any]) -> None:
    """Writes the curves of a run's summary over its steps."""
    save(target, charts.curves(data["curves"], data["resumed_at"]), columns=2)


def save_timeline(timeline: Timeline, title: str, target: str) -> None:
    """Writes a timeline, a row per pipeline rank."""
    save(target, [charts.gantt({"": timeline})._replace(title=title)])


def save_scatter(scored: "Sequence[Scored]", target: str) -> None:
    """Writes predicted over measured seconds of every run, a colour per source."""
    timed = [
        (run.record.source, run.record.seconds, run.seconds) for run in scored if run.record.seconds
    ]

    def draw(axes: "Axes") -> None:
        for source in sorted({source for source, *_ in timed}):
            pairs = [pair for name, *pair in timed if name == source]
            axes.plot(*zip(*pairs, strict=True), ".", ms=5, alpha=0.7, label=source)
        seconds = [measured for _, measured, _ in timed]
        ends = [min(seconds, default=1.0) / 2, max(seconds, default=1.0) * 2]
        axes.plot(ends, ends, color="black", lw=0.8)
        lower, upper = [0.8 * end for end in ends], [1.2 * end for end in ends]
        axes.fill_between(ends, lower, upper, color="black", alpha=0.08, lw=0, label="within 20 %")
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        axes.set(xlabel="published step time, seconds", ylabel="predicted, seconds")
        axes.legend(loc="upper left", fontsize="x-small")

    save(target, [Chart(8.0, draw)], width=8.0)
