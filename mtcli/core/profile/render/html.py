"""Writes HTML pages of a measured config and of a finished run, to be read offline.

The figures of `--json` lie in the page as well, in the element `mtcli-data`. plotly lies in it
once, packed (gzip, base64: 2 MB in place of 5), and the browser unpacks it; nothing is fetched.
Colours follow the reader's light or dark scheme, and print as light.
"""

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from mtcli.core.config.loading import dump_toml
from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.memory import state_bytes
from mtcli.core.plan.workload import Workload
from mtcli.core.profile.curves import MOST_POINTS
from mtcli.core.profile.figures import Profile, fullest_stage, planned_memory
from mtcli.core.profile.finished_run import FinishedRun, planned_of
from mtcli.core.profile.render.text import rank_rows, run_rows, summary_rows
from mtcli.core.runtime.atomic_writes import aside

if TYPE_CHECKING:
    import plotly.graph_objects as go

Data = Mapping[str, Any]

GRID = "rgba(128, 128, 128, 0.25)"
STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --quiet: #5f6368; --line: #d8dadd;
        --paper: #fff; --shade: #f4f5f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --quiet: #a4a8ad; --line: #3c4045;
        --paper: #17181a; --shade: #222427; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1180px;
       padding: 1.2rem clamp(.7rem, 3vw, 2rem) 3rem; color: var(--ink); background: var(--paper); }
h1, p { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .8rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem; }
p.note { color: var(--quiet); font-size: .92rem; margin: 0 0 .3rem; max-width: 75ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1.2rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
         vertical-align: baseline; }
th:first-child, td:first-child { text-align: left; } th { color: var(--quiet); font-weight: 500; }
pre { background: var(--shade); border-radius: 6px; padding: .8rem; overflow-x: auto;
      font-size: 13px; }
@media print { :root { --ink: #000; --quiet: #444; --line: #bbb; --paper: #fff; --shade: #f4f5f6; }
  body { max-width: none; padding: 0; } section { break-inside: avoid; } .modebar { display: none; }
  pre { white-space: pre-wrap; break-inside: auto; } }
"""

LOADER = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const charts = JSON.parse(document.getElementById("mtcli-charts").textContent);
const config = {displaylogo: false, responsive: true};
const colour = print => ({"font.color": dark.matches && !print ? "#e8e8ea" : "#1d1d1f"});
const recolour = print => { for (const name in charts) Plotly.relayout(name, colour(print)); };
function draw() {
  for (const [name, chart] of Object.entries(charts)) {
    chart.layout.font = {family: "system-ui, sans-serif", size: 13, color: colour()["font.color"]};
    Plotly.newPlot(name, chart.data, chart.layout, config);
  }
  document.documentElement.dataset.drawn = "yes";
  dark.addEventListener("change", () => recolour(false));
  addEventListener("beforeprint", () => recolour(true));
  addEventListener("afterprint", () => recolour(false));
}
async function unpack() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  draw();
}
unpack().catch(error => {
  document.querySelector("h1").insertAdjacentHTML("afterend",
    "<p class=note>The charts need a browser of 2023 or later, with scripts allowed.</p>");
  throw error;
});
"""


class PageSection(NamedTuple):
    """A heading, what to know when reading it, and HTML or a chart ({data, layout} of plotly)."""

    title: str
    note: str
    html: str = ""
    chart: Data | None = None
    name: str = ""  # of the chart in the page: chart-<name>


def write_profile_page(target: str, profile: Profile, data: Data) -> None:
    """Writes the page of a measured config; `data` is what `--json` holds."""
    title = f"mtcli profile: {profile.config.model.architecture}, {data['world']} ranks"
    sections = [
        PageSection("", "", _table(("", "measured", "planned"), summary_rows(data))),
        *_time(profile, data),
        *_memory(data),
        *_communication(data),
        *_layout(data["rank_map"]),
        _config(profile.config),
    ]
    _write(target, title, sections, data)


def write_run_page(target: str, run: FinishedRun, data: Data) -> None:
    """Writes the page of a finished run; `data` is what `--json` holds."""
    sections = [
        PageSection("", "", _table(("", "of the run"), run_rows(data))),
        *_training(run, data),
        *([_ranks(data)] if "rank_times" in data else []),
        *(_planned(run, run.world, data["step_seconds"]["median"]) if run.world else []),
        *(_layout(data["rank_map"]) if run.world else []),
        _config(run.config),
    ]
    _write(target, f"mtcli run {run.folder}", sections, data)


def _time(profile: Profile, data: Data) -> list[PageSection]:
    from mtcli.core.profile.render import charts

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
    shares = charts.stacked_shares(rows, tuple(data["shares"]))
    return [
        chart("pipeline", f"Pipeline: {' over '.join(timelines)}", note, charts.gantt(timelines)),
        chart("shares", "Where the step goes", spent, shares),
        chart("steps", "Step time", "Of the slowest rank.", charts.step_bars(data["steps"])),
        chart("kernels", "Longest kernels", "", charts.kernel_bars(data["kernels"])),
    ]


def _memory(data: Data) -> list[PageSection]:
    from mtcli.core.profile.render import charts

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


def _communication(data: Data) -> list[PageSection]:
    from mtcli.core.profile.render import charts

    rows = data["communication_by_axis"]
    if not rows:
        return []
    note = "Bytes that each rank gave each other one in one step, as a ring of each axis moves "
    note += "them; hover for the axes."
    figure = charts.heat_map(data["communication_matrix_bytes"], rows)
    seconds = charts.axis_seconds(data["communication"]["by_axis"])
    waits = "Seconds of a step that a rank waits (CPU), for late ranks too, or that its kernels "
    waits += "take (GPU). Planned: the transfers alone, hidden or not."
    return [
        chart("matrix", "Who sends to whom", note, figure),
        chart("axes", "Communication by axis", waits, seconds),
    ]


def _training(run: FinishedRun, data: Data) -> list[PageSection]:
    from mtcli.core.profile.render import charts

    note = ""
    if len(run.rows) > MOST_POINTS:
        note = f"Of {len(run.rows):,} steps the lowest and highest of each stretch are drawn. "
    if data["resumed_at"]:
        steps = ", ".join(f"{step:,}" for step in data["resumed_at"][:10])
        note += f"Dotted: the run took up again at step {steps}; steps run twice show the last run."
    seconds = [row["step_seconds"] for row in run.rows]
    sections = [
        chart("training", "Training", note, charts.curves(data["curves"], data["resumed_at"])),
        chart("step-times", "Step time", "", charts.step_histogram(seconds)),
    ]
    if data["saves"]:
        sections.append(chart("saves", "Saves", "", charts.saves(data["saves"])))
    return sections


def _ranks(data: Data) -> PageSection:
    """A section on who holds the others up."""
    note = "Seconds of a step, medians over the steps. A slow rank computes long and waits little."
    table = _table(("", "largest", "median of ranks", "largest of"), rank_rows(data))
    return PageSection("Stragglers", note, table)


def _planned(run: FinishedRun, world: int, step_seconds: float) -> list[PageSection]:
    from mtcli.core.profile.render import charts

    work = Workload.of(run.config, world)
    memory = [
        {"label": f"pipeline rank {rank}"}
        | dict(zip(charts.STATE, state_bytes(work, rank), strict=True))
        for rank in range(work.layout.pp)
    ]
    note = "The schedule, a backward twice a forward, in a step of median length. "
    note += f"mtcli profile {run.folder}/config.toml measures the real one."
    timeline = charts.gantt({"schedule": planned_of(run, step_seconds)})
    state = "Memory of weights, gradients and optimizer"
    return [
        chart("pipeline", "Pipeline: the schedule", note, timeline),
        chart("memory-by-rank", state, "", charts.by_rank(memory, charts.STATE)),
    ]


def _layout(ranks: Sequence[Data]) -> list[PageSection]:
    """Sections that map the ranks, and the experts' grid where it is another one."""
    from mtcli.core.profile.render import charts

    note = "A row per pipeline rank with its layers; within it, neighbours in a row talk most."
    sections = [chart("layout", "Layout", note, charts.grid_map(ranks, "attention"))]
    if any(rank["experts"]["ep"] or rank["experts"]["etp"] for rank in ranks):
        note = "The same ranks as the experts see them."
        figure = charts.grid_map(ranks, "experts")
        sections.append(chart("experts", "Layout of the experts", note, figure))
    return sections


def _config(config: RunConfig) -> PageSection:
    """A section with the full config, defaults included."""
    return PageSection("Config", "", f"<pre>{escape(dump_toml(config))}</pre>")


def chart(name: str, title: str, note: str, figure: "go.Figure") -> PageSection:
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
    return PageSection(title, note, chart=json.loads(figure.to_json()), name=name)


def _write(target: str, title: str, sections: Sequence[PageSection], data: Data) -> None:
    """Writes a page, or nothing; `data` is what `--json` holds."""
    charts = {f"chart-{s.name}": s.chart for s in sections if s.chart is not None}
    parts = (
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)}</title><link rel=icon href='data:,'>",
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
        *map(_section, sections),
        f"<script type='application/json' id='mtcli-data'>{_embedded(data)}</script>\n",
        f"<script type='application/json' id='mtcli-charts'>{_embedded(charts)}</script>\n",
        f"<script type='text/plain' id='plotly'>{_packed_plotly()}</script>",
        f"<script>{LOADER}</script></body></html>\n",
    )
    with aside(target) as path, path.open("w", encoding="utf-8") as file:
        file.writelines(parts)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose first column names its rows."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _embedded(data: object) -> str:
    """Encodes JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _section(section: PageSection) -> str:
    note = f"<p class=note>{escape(section.note)}</p>" if section.note else ""
    chart = f"<div id='chart-{section.name}'></div>" if section.chart is not None else ""
    heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    return f"<section>{heading}{note}{section.html}{chart}</section>"
