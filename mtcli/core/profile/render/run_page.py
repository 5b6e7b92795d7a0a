"""The report of a finished run: one HTML page of what its folder holds, that works offline."""

from collections.abc import Sequence

from mtcli.core.plan.memory import state_bytes
from mtcli.core.plan.workload import Workload
from mtcli.core.profile.finished_run import MOST_POINTS, FinishedRun, planned_of
from mtcli.core.profile.render.html import (
    Data,
    PageSection,
    chart,
    config_section,
    layout_sections,
    table,
    write,
)
from mtcli.core.profile.render.text import run_rows


def write_run_page(target: str, run: FinishedRun, data: Data) -> None:
    """Writes the page of a finished run; `data` is what `--json` holds."""
    sections = [
        PageSection("", "", table(("", "of the run"), run_rows(data))),
        *_training(run, data),
    ]
    if run.world:
        sections += _planned(run, data["step_seconds"]["median"])
        sections += layout_sections(data["rank_map"])
    sections.append(config_section(run.config))
    write(target, f"mtcli run {run.folder}", sections, data)


def _training(run: FinishedRun, data: Data) -> list[PageSection]:
    from mtcli.core.profile.render import charts

    note = ""
    if len(run.rows) > MOST_POINTS:
        note = f"Of {len(run.rows):,} steps the lowest and highest of each stretch are drawn. "
    if data["resumed_at"]:
        steps = ", ".join(f"{step:,}" for step in data["resumed_at"][:10])
        note += f"Dotted: the run took up again at step {steps}; steps run twice show the last run."
    seconds = [row["step_seconds"] for row in run.rows]
    found = [
        chart("training", "Training", note, charts.curves(data["curves"], data["resumed_at"])),
        chart("step-times", "Step time", "", charts.step_histogram(seconds)),
    ]
    if data["saves"]:
        found.append(chart("saves", "Saves", "", charts.saves(data["saves"])))
    return found


def _planned(run: FinishedRun, step_seconds: float) -> Sequence[PageSection]:
    from mtcli.core.profile.render import charts

    assert run.world, "what is planned depends on the ranks"
    work = Workload.of(run.config, run.world)
    timeline = charts.gantt({"schedule": planned_of(run, step_seconds)})
    memory = [
        {
            "label": f"pipeline rank {place}",
            **dict(zip(charts.STATE, state_bytes(work, place), strict=True)),
        }
        for place in range(work.layout.pp)
    ]
    note = "The schedule, a backward twice a forward, in a step of median length. "
    note += f"mtcli profile {run.folder}/config.toml measures the real one."
    return [
        chart("pipeline", "Pipeline: the schedule", note, timeline),
        chart(
            "memory-by-rank",
            "Memory of weights, gradients and optimizer",
            "",
            charts.by_rank(memory, charts.STATE),
        ),
    ]
