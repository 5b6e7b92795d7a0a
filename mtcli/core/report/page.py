"""The report of a measured config: one HTML page that works offline and holds its figures.

The figures of `--json` lie in the page as well, in the element `mtcli-data`.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from mtcli.core.report.beside import fullest_stage, planned_memory
from mtcli.core.report.colors import GRID
from mtcli.core.report.figures import Profile
from mtcli.core.report.tables import summary_rows
from mtcli.core.report.template import Section, document, table
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.load import dump_toml
from mtcli.core.spec.outputs import aside

if TYPE_CHECKING:
    import plotly.graph_objects as go

Data = Mapping[str, Any]


def write_profile_page(target: str, profile: Profile, data: Data) -> None:
    """Writes the page of a measured config; `data` is what `--json` holds."""
    title = f"mtcli profile: {profile.config.model.architecture}, {data['world']} ranks"
    headline = table(("", "measured", "planned"), summary_rows(data))
    sections = [
        Section("", "", headline),
        *_time(profile, data),
        *_memory(profile, data),
        *_communication(data),
        *layout_sections(data["rank_map"]),
        config_section(profile.config),
    ]
    write(target, title, sections, data)


def write(target: str, title: str, sections: Sequence[Section], data: Data) -> None:
    """Writes a page: whole, or not at all."""
    with aside(target) as path, path.open("w", encoding="utf-8") as file:
        file.write(document(title, sections, data))


def chart(name: str, title: str, note: str, figure: "go.Figure") -> Section:
    """A section with a chart, in the page's look."""
    figure.update_layout(
        template="none",
        margin={"l": 64, "r": 16, "t": 48 if len(figure.data) > 1 else 20, "b": 52},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        hoverlabel={"align": "left"},
    )
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    return Section(title, note, chart=json.loads(figure.to_json()), name=name)


def layout_sections(ranks: Sequence[Data]) -> list[Section]:
    """The map of the ranks, and of the experts' grid where it is another one."""
    from mtcli.core.report import maps

    note = "A row per pipeline rank with its layers; within it, neighbours in a row talk most."
    found = [chart("layout", "Layout", note, maps.grid_map(ranks, "attention"))]
    if any(one["experts"]["ep"] or one["experts"]["etp"] for one in ranks):
        note = "The same ranks as the experts see them."
        figure = maps.grid_map(ranks, "experts")
        found.append(chart("experts", "Layout of the experts", note, figure))
    return found


def config_section(config: RunConfig) -> Section:
    """The whole config, defaults included."""
    return Section("Config", "", f"<pre>{escape(dump_toml(config))}</pre>")


def _time(profile: Profile, data: Data) -> list[Section]:
    from mtcli.core.report import charts

    timelines = {"planned": profile.planned} if profile.planned else {}
    timelines["measured"] = profile.measured
    note = "Drag across to zoom, double-click to go back. Planned: as mtcli plan simulates it."
    count = sum(len(timeline.spans) for timeline in timelines.values())
    if count > charts.MOST_SPANS:
        note += f" Drawn are the first {charts.MOST_SPANS:,} of {count:,} ops."
    rows = [{"label": f"rank {row['pp_rank']}", **row} for row in data["shares_by_rank"]]
    plan = {kind: data["figures"][f"share.{kind}"]["planned"] for kind in data["shares"]}
    if data["predicted"]:
        rows.append({"label": "planned, mean", **plan})
    spent = "Each second of the step under one name, per pipeline rank."
    return [
        chart("pipeline", f"Pipeline: {' over '.join(timelines)}", note, charts.gantt(timelines)),
        chart(
            "shares",
            "Where the step goes",
            spent,
            charts.stacked_shares(rows, tuple(data["shares"])),
        ),
        chart("steps", "Step time", "Of the slowest rank.", charts.step_bars(data["steps"])),
        chart("kernels", "Longest kernels", "", charts.kernel_bars(data["kernels"])),
    ]


def _memory(profile: Profile, data: Data) -> list[Section]:
    from mtcli.core.report import memory_charts as charts

    plan = planned_memory(data["figures"])
    limit = data["device_bytes"] or 0
    note = f"Of rank {data['fullest_rank']}, the fullest; other is what is left up to all that the "
    note += "process takes: its libraries, and what the allocator keeps."
    note += f" Usable memory of the device: {limit / 2**30:,.1f} GiB." if limit else ""
    figure = charts.waterfall(data["memory_bytes"], plan, limit)
    rows = [{"label": f"pipeline rank {row['pp_rank']}", **row} for row in data["memory_by_rank"]]
    if plan:
        rows.append({"label": f"pipeline rank {fullest_stage(data)}, planned", **plan})
    curve = data["memory_by_kind_over_time"]
    lives = f"Of rank {curve['rank']}. Activations outlive the op that makes them; temporary is "
    lives += "what is gone by its end."
    return [
        chart("memory", "Memory of a process", note, figure),
        chart("memory-over-time", "Memory over the step", lives, charts.over_time(curve)),
        chart("memory-by-rank", "Memory by rank", "", charts.by_rank(rows, charts.KINDS)),
    ]


def _communication(data: Data) -> list[Section]:
    from mtcli.core.report import charts, maps

    rows = data["communication_by_axis"]
    if not rows:
        return []
    note = "Bytes that each rank gave each other one in one step, as a ring of each axis moves "
    note += "them; hover for the axes."
    figure = maps.heat_map(data["communication_matrix_bytes"], rows)
    seconds = charts.axis_seconds(data["communication"]["by_axis"])
    waits = "Seconds of a step that a rank waits (CPU), for late ranks too, or that its kernels "
    waits += "take (GPU). Planned: the transfers alone, hidden or not."
    return [
        chart("matrix", "Who sends to whom", note, figure),
        chart("axes", "Communication by axis", waits, seconds),
    ]
