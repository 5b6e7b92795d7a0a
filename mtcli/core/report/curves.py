"""Interactive charts of a finished run: its curves over the steps, step times and saves."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mtcli.core.report.colors import BLUE, GREEN, GRID, ORANGE
from mtcli.core.report.history import CURVES, histogram

Row = Mapping[str, Any]


def curves(told: Mapping[str, Row], resumed: Sequence[int] = ()) -> go.Figure:
    """{curve: {steps, values}} on one step axis; a line where the run took up again."""
    shown = {name: one for name, one in told.items() if name in CURVES}
    height = -(-len(shown) // 2)
    figure = make_subplots(
        rows=height,
        cols=2,
        shared_xaxes="all",
        subplot_titles=list(shown),
        vertical_spacing=0.1,
        horizontal_spacing=0.09,
    )
    for place, (name, one) in enumerate(shown.items()):
        line = go.Scatter(x=one["steps"], y=one["values"], name=name, line={"color": BLUE})
        line.update(showlegend=False, mode="lines" if len(one["steps"]) > 1 else "markers")
        figure.add_trace(line, row=place // 2 + 1, col=place % 2 + 1)
    valid = told.get("validation loss")
    if valid:
        line = go.Scatter(x=valid["steps"], y=valid["values"], name="validation loss")
        line.update(mode="lines+markers", line={"color": ORANGE})
        figure.add_trace(line, row=1, col=1)
    for step in resumed:
        figure.add_vline(step, line={"color": GREEN, "dash": "dot", "width": 1.5})
    figure.update_xaxes(title="step", row=height)
    figure.update_layout(height=90 + 230 * height, showlegend=bool(valid))
    return figure


def step_histogram(seconds: Sequence[float]) -> go.Figure:
    """How many steps took how long."""
    starts, counts, width = histogram(seconds)
    figure = go.Figure(
        go.Bar(
            x=[start + width / 2 for start in starts],
            y=counts,
            width=width,
            marker={"color": BLUE},
            hovertemplate="%{y:,} steps of about %{x:.4g} s<extra></extra>",
        )
    )
    figure.update_xaxes(title="seconds of a step")
    figure.update_yaxes(title="steps", gridcolor=GRID)
    figure.update_layout(height=280, bargap=0)
    return figure


def saves(rows: Sequence[Row]) -> go.Figure:
    """For each checkpoint the seconds that training stood still, beside those of its writing."""
    steps = [str(row["step"]) for row in rows]
    figure = go.Figure()
    for name, key, color in (
        ("training stood still", "stall_seconds", ORANGE),
        ("written in", "write_seconds", BLUE),
    ):
        figure.add_trace(
            go.Bar(
                x=steps,
                y=[row.get(key) for row in rows],
                name=name,
                marker={"color": color},
                hovertemplate=name + " %{y:.3f} s<br>step %{x}<extra></extra>",
            )
        )
    figure.update_layout(barmode="group", height=280)
    figure.update_xaxes(title="checkpoint of step", type="category")
    figure.update_yaxes(title="seconds")
    return figure
