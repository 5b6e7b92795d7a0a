"""Writes HTML pages of a measured config and of a finished run, to be read offline."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mtcli.core.config.counts import counted
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.memory import state_bytes
from mtcli.core.plan.workload import Workload
from mtcli.core.profile.curves import MOST_POINTS
from mtcli.core.profile.figures import Profile, fullest_stage, planned_memory
from mtcli.core.profile.finished_run import FinishedRun, planned_of
from mtcli.core.profile.render import charts
from mtcli.core.profile.render.page import PageSection, chart, table, write_page
from mtcli.core.profile.render.text import rank_rows, run_rows, summary_rows

Data = Mapping[str, Any]


def write_profile_page(target: str, profile: Profile, data: Data) -> None:
    """Writes the page of a measured config; `data` is the JSON of `--json`."""
    title = f"mtcli profile: {profile.config.model.architecture}, {counted(data['world'], 'rank')}"
    sections = [
        PageSection("", "", table(("", "measured", "planned"), summary_rows(data))),
        *_time(profile, data),
        *_memory(data),
        *_communication(data),
        *_layout(data["rank_map"]),
        _config(profile.config),
    ]
    write_page(target, title, sections, data)


def write_run_page(target: str, run: FinishedRun, data: Data) -> None:
    """Writes the page of a finished run; `data` is the JSON of `--json`."""
    sections = [
        PageSection("", "", table(("", "of the run"), run_rows(data))),
        *_training(run, data),
        *([_ranks(data)] if "rank_times" in data else []),
        *(_planned(run, run.world, data["step_seconds"]["median"]) if run.world else []),
        *(_layout(data["rank_map"]) if run.world else []),
        _config(run.config),
    ]
    write_page(target, f"mtcli run {run.folder}", sections, data)


def _time(profile: Profile, data: Data) -> list[PageSection]:
    timelines = {"planned": profile.planned} if profile.planned else {}
    timelines["measured"] = profile.measured
    note = "The slider enlarges it. Planned: as mtcli plan simulates it."
    count = sum(len(timeline.spans) for timeline in timelines.values())
    if count > charts.MOST_SPANS:
        note += f" Drawn are the first {charts.MOST_SPANS:,} of {count:,} ops."
    rows = [{"label": f"rank {row['pp_rank']}", **row} for row in data["shares_by_rank"]]
    plan = {kind: data["figures"][f"share.{kind}"]["planned"] for kind in data["shares"]}
    if data["predicted"]:
        rows.append({"label": "planned, mean", **plan})
    profiled = f"Of the step under the profiler, which took {data['profiled_seconds']:.4g} s; the "
    profiled += "timed ones ran without it. Operators of several threads overlap."
    spent = "Each second of the step under one name, per pipeline rank."
    shares = charts.stacked_shares(rows, tuple(data["shares"]))
    timeline = charts.gantt(timelines, charts.MOST_SPANS)
    return [
        chart("pipeline", f"Pipeline: {' over '.join(timelines)}", note, timeline),
        chart("shares", "Where the step goes", spent, shares),
        chart("steps", "Step time", "Of the slowest rank.", charts.step_bars(data["steps"])),
        chart("kernels", "Longest kernels", profiled, charts.kernel_bars(data["kernels"])),
    ]


def _memory(data: Data) -> list[PageSection]:
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
    lives += "what is gone by its end. By the clock of the measured timeline."
    return [
        chart("memory", "Memory of a process", note, figure),
        chart("memory-over-time", "Memory over the step", lives, charts.over_time(curve)),
        chart("memory-by-rank", "Memory by rank", "", charts.by_rank(rows, charts.KINDS)),
    ]


def _communication(data: Data) -> list[PageSection]:
    rows = data["communication_by_axis"]
    if not rows:
        return []
    note = "Bytes that each rank gave each other one in one step, as a ring of each axis moves "
    note += "them; rest the pointer on a box for the axes."
    figure = charts.heat_map(data["communication_matrix_bytes"], rows)
    seconds = charts.axis_seconds(data["communication"]["by_axis"])
    waits = "Seconds of a step that a rank waits (CPU), for late ranks too, or that its kernels "
    waits += "take (GPU). Planned: the transfers alone, hidden or not."
    return [
        chart("matrix", "Who sends to whom", note, figure),
        chart("axes", "Communication by axis", waits, seconds),
    ]


def _training(run: FinishedRun, data: Data) -> list[PageSection]:
    note = ""
    if len(run.rows) > MOST_POINTS:
        note = f"Of {len(run.rows):,} steps the lowest and highest of each stretch are drawn. "
    if data["resumed_at"]:
        steps = ", ".join(f"{step:,}" for step in data["resumed_at"][:10])
        note += f"Dotted: the run took up again at step {steps}; steps run twice show the last run."
    seconds = [row["step_seconds"] for row in run.rows]
    curves = charts.curves(data["curves"], data["resumed_at"])
    sections = [
        chart("training", "Training", note, *curves, columns=2),
        chart("step-times", "Step time", "", charts.step_histogram(seconds)),
    ]
    if data["saves"]:
        sections.append(chart("saves", "Saves", "", charts.saves(data["saves"])))
    return sections


def _ranks(data: Data) -> PageSection:
    note = "Seconds of a step, medians over the steps. A slow rank computes long and waits little."
    rows = table(("", "largest", "median of ranks", "largest of"), rank_rows(data))
    return PageSection("Stragglers", note, rows)


def _planned(run: FinishedRun, world: int, step_seconds: float) -> list[PageSection]:
    work = Workload.of(run.config, world)
    memory = [
        {"label": f"pipeline rank {rank}"}
        | dict(zip(charts.STATE, state_bytes(work, rank), strict=True))
        for rank in range(work.layout.pp)
    ]
    note = "The schedule, a backward twice a forward, in a step of median length. "
    note += f"mtcli profile {run.folder}/config.toml measures the real one."
    timeline = charts.gantt({"schedule": planned_of(run, step_seconds)}, charts.MOST_SPANS)
    state = "Memory of weights, gradients and optimizer"
    return [
        chart("pipeline", "Pipeline: the schedule", note, timeline),
        chart("memory-by-rank", state, "", charts.by_rank(memory, charts.STATE)),
    ]


def _layout(ranks: Sequence[Data]) -> list[PageSection]:
    """Sections that map the ranks, and the experts' grid where it is another one."""
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
