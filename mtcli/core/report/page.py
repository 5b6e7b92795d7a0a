"""The report: one HTML page that holds its charts, their data and plotly itself: it works offline.

The figures of `--json` lie in the page as well, in the element `mtcli-data`.
"""

import json
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from mtcli.core.cost.memory import state_bytes
from mtcli.core.cost.workload import Workload
from mtcli.core.report.attribution import KINDS
from mtcli.core.report.figures import Profile
from mtcli.core.report.files import aside
from mtcli.core.report.finished import FinishedRun, planned_of, summary_of
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.load import dump_toml

if TYPE_CHECKING:
    import plotly.graph_objects as go

STATE = ("weights", "gradients", "optimizer", "activations")
Sections = dict[str, "go.Figure | str"]

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1180px; padding: 1.5rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; margin: 0 0 .8rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .2rem; }
.cards { display: flex; flex-wrap: wrap; gap: .7rem; }
.card { border: 1px solid #ddd; border-radius: 6px; padding: .5rem .9rem; }
.card b { display: block; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.card span { color: #666; font-size: .85rem; }
pre { background: #f6f6f6; border-radius: 6px; padding: .8rem; overflow-x: auto; font-size: 13px; }
"""


def write_profile_page(target: str, profile: Profile, data: Mapping[str, Any]) -> None:
    """Writes the page of a measured config; `data` is what `--json` holds."""
    from mtcli.core.report import charts

    timelines = {"planned": profile.planned, "measured": profile.measured}
    memory = [{"label": f"pipeline rank {r['pp_rank']}", **r} for r in data["memory_by_rank"]]
    if data["predicted"]:
        memory.append({"label": "planned, fullest rank", **data["predicted"]["memory_bytes"]})
    sections: Sections = {
        "Pipeline: planned over measured": charts.gantt(timelines),
        "Where the step goes": charts.stacked_shares(data["shares_by_rank"], KINDS),
        "Step time": charts.step_bars(data["steps"]),
        "Memory by kind": charts.memory_bars(memory, STATE),
        "Memory over the profiled step": charts.memory_curve(data["memory_over_time"]),
        "Longest kernels": charts.kernel_bars(data["kernels"]),
    }
    _write(target, "mtcli profile", _cards(data), sections, (profile.config, profile.world, data))


def write_run_page(target: str, run: FinishedRun) -> None:
    """Writes the page of a finished run, from what its folder holds."""
    from mtcli.core.report import charts

    data = summary_of(run)
    sections: Sections = {"Training": charts.curves(run.rows)}
    if run.world:
        planned = planned_of(run, data["step_seconds"]["median"])
        sections["Pipeline: the schedule, a backward twice a forward"] = charts.gantt(
            {"planned": planned}
        )
        work = Workload.of(run.config, run.world)
        memory = [
            {
                "label": f"pipeline rank {place}",
                **dict(zip(STATE, state_bytes(work, place), strict=False)),
            }
            for place in range(work.layout.pp)
        ]
        sections["Memory of weights, gradients and optimizer"] = charts.memory_bars(
            memory, STATE[:3]
        )
    _write(target, f"mtcli run {run.folder}", _cards(data), sections, (run.config, run.world, data))


def _cards(data: Mapping[str, Any]) -> dict[str, str]:
    """The headline figures, as (what, how much)."""
    cards = {
        "step time, median": f"{data['step_seconds']['median']:.4g} s",
        "tokens/s": f"{data['tokens_per_second']:,.0f}",
        "MFU": f"{data['mfu']:.1%}",
        "parameters": f"{data['parameters']:,}",
    }
    if "hfu" in data:
        cards["HFU"] = f"{data['hfu']:.1%}"
        bubble = data["bubble_fraction"]
        cards["bubble, planned"] = f"{bubble['measured']:.1%}, {bubble['planned']:.1%}"
    if "loss" in data:
        cards["loss, first to last"] = f"{data['loss']['first']:.3f} to {data['loss']['last']:.3f}"
    if data["world"]:
        cards["ranks"] = str(data["world"])
    return cards


def _write(
    target: str,
    title: str,
    cards: Mapping[str, str],
    sections: Sections,
    of: tuple[RunConfig, int | None, Mapping[str, Any]],
) -> None:
    from plotly.offline import get_plotlyjs

    from mtcli.core.report import charts

    config, world, data = of
    if world:
        layout = ParallelLayout.of(config.parallel, world)
        sections = sections | {"Layout": charts.layout_map(layout)}
    sections = sections | {"Config": f"<pre>{escape(dump_toml(config))}</pre>"}
    shown = "".join(
        f"<div class=card><span>{escape(name)}</span><b>{escape(value)}</b></div>"
        for name, value in cards.items()
    )
    body = "".join(
        f"<h2>{escape(name)}</h2>{_html(section, place)}"
        for place, (name, section) in enumerate(sections.items())
    )
    embedded = json.dumps(data).replace("</", "<\\/")
    with aside(target) as path, path.open("w", encoding="utf-8") as file:
        file.write(f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}")
        file.write(f"</title><link rel=icon href='data:,'><style>{STYLE}</style>")
        file.write(f"<script>{get_plotlyjs()}</script><h1>{escape(title)}</h1>")
        file.write(f"<div class=cards>{shown}</div>{body}")
        file.write(f"<script type='application/json' id='mtcli-data'>{embedded}</script></html>\n")


def _html(section: "go.Figure | str", place: int) -> str:
    if isinstance(section, str):
        return section
    section.update_layout(template="plotly_white", margin={"l": 60, "r": 20, "t": 30, "b": 50})
    section.update_yaxes(automargin=True)
    config = {"scrollZoom": True, "displaylogo": False, "responsive": True}
    return str(
        section.to_html(
            full_html=False, include_plotlyjs=False, div_id=f"chart-{place}", config=config
        )
    )
