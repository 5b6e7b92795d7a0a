"""Writes pictures for papers and READMEs: of profiles, finished runs and plans."""

from collections.abc import Mapping
from typing import Any

from mtcli.core.profile.breakdown import KINDS as TIME_KINDS
from mtcli.core.profile.figures import Profile
from mtcli.core.profile.render import charts
from mtcli.core.profile.render.drawing import save
from mtcli.core.schedule.timeline import Timeline


def save_profile(target: str, profile: Profile) -> None:
    """Writes the planned timeline over the measured one, each rank's shares, and memory."""
    timelines, bubbles = {}, []
    if profile.planned and profile.prediction:
        timelines["planned"] = profile.planned
        bubbles.append(f"planned {profile.prediction.bubble_fraction:.1%}")
    timelines["measured"] = profile.measured
    bubbles.append(f"measured {profile.measured.bubble_fraction:.1%}")
    rows = [{"label": f"rank {n}", **row} for n, row in enumerate(profile.shares_by_rank)]
    data = profile.memory_over_time
    limits = charts.time_limits(data, timelines.values())
    titled = {
        f"bubble over busy time: {', '.join(bubbles)}": charts.gantt(timelines, limits=limits),
        "where the step goes": charts.stacked_shares(rows, TIME_KINDS),
        f"memory of rank {data['rank']}": charts.over_time(data, limits),
    }
    save(target, [chart._replace(title=title) for title, chart in titled.items()])


def save_run(target: str, data: Mapping[str, Any]) -> None:
    """Writes the curves of a run's summary over its steps."""
    save(target, charts.curves(data["curves"], data["resumed_at"]), columns=2)


def save_timeline(timeline: Timeline, title: str, target: str) -> None:
    """Writes a timeline, a row per pipeline rank, with its bubble as drawn."""
    bubble = f"bubble over busy time {timeline.bubble_fraction:.1%}"
    save(target, [charts.gantt({"": timeline})._replace(title=f"{title}\n{bubble}")])
