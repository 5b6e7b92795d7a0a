"""Writes pictures and pages of runs' losses, alone or compared. Imports no torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtcli.core.profile.render.drawing import save
from mtcli.core.profile.render.page import PageSection, chart, table, write_page
from mtcli.core.runs.loss_charts import Look, loss_chart
from mtcli.core.runs.loss_curves import LossCurves

RunTable = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows
AXES = {"tokens": "over tokens", "time": "over time", "steps": "over steps"}


def names_of(folders: Sequence[Path]) -> list[str]:
    """Names runs by their paths below the folder that all of them share."""
    shared = os.path.commonpath([folder.absolute().parent for folder in folders])
    return [os.path.relpath(folder.absolute(), shared) for folder in folders]


def save_losses(target: str, curves: Sequence[LossCurves], axes: Sequence[str], look: Look) -> None:
    """Writes a picture of losses, a chart for each axis."""
    charts = [loss_chart(curves, axis, look) for axis in axes]
    titles = [f"loss {AXES[axis]}" for axis in axes]
    save(target, [c._replace(title=title) for c, title in zip(charts, titles, strict=True)])


def write_losses_page(
    target: str,
    curves: Sequence[LossCurves],
    axes: Sequence[str],
    look: Look,
    data: dict[str, Any],
    tables: Sequence[RunTable] = (),
) -> None:
    """Writes a page of losses, a chart for each axis, and tables below; `data` is the JSON of
    `--json`."""
    note = "Lines are means over neighbouring steps; every step is drawn lightly behind them."
    sections = [
        chart(f"loss-{axis}", f"Loss {AXES[axis]}", note, loss_chart(curves, axis, look))
        for axis in axes
    ]
    sections += [PageSection(title, "", table(columns, rows)) for title, columns, rows in tables]
    write_page(target, f"mtcli runs: {', '.join(look.names)}", sections, data)
