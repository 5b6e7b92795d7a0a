"""Interactive charts of where a step's time goes, as plotly figures made from plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from mtcli.core.cost.plot import COLORS, LABELS
from mtcli.core.report.colors import BLUE, ORANGE, TIME
from mtcli.core.schedule.timeline import Span, Timeline

MOST_SPANS = 6000  # bars that a browser draws and zooms without a pause
MOST_NAMED = 400  # bars that have room for a name inside

Row = Mapping[str, Any]


def gantt(timelines: Mapping[str, Timeline]) -> go.Figure:
    """The timelines' ops on one time axis: for each pipeline rank a row per timeline.

    Of longer timelines the first MOST_SPANS ops by their start.
    """
    figure = go.Figure()
    ranks = max(timeline.num_ranks for timeline in timelines.values())
    order = [f"rank {rank} {name}" for rank in range(ranks) for name in timelines]
    rows = [(name, span) for name, timeline in timelines.items() for span in timeline.spans]
    rows = sorted(rows, key=lambda row: row[1].start)[:MOST_SPANS]
    for kind in sorted({span.op.kind for _, span in rows}, reverse=True):
        figure.add_trace(_bars(kind, [row for row in rows if row[1].op.kind == kind]))
    if len(rows) <= MOST_NAMED:
        figure.update_traces(
            texttemplate="%{customdata[0]}",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
        )
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1], fixedrange=True)
    figure.update_xaxes(title="seconds since the first op of the step")
    figure.update_layout(
        barmode="overlay",
        bargap=0.25,
        height=150 + 30 * len(order),
        uniformtext={"mode": "hide", "minsize": 9},
        dragmode="zoom",
    )
    return figure


def _bars(kind: str, rows: Sequence[tuple[str, Span]]) -> go.Bar:
    return go.Bar(
        orientation="h",
        y=[f"rank {span.rank} {name}" for name, span in rows],
        base=[span.start for _, span in rows],
        x=[span.end - span.start for _, span in rows],
        customdata=[(str(span.op), span.end, 1e3 * (span.end - span.start)) for _, span in rows],
        hovertemplate="%{customdata[0]}, %{y}<br>%{base:.5f} to %{customdata[1]:.5f} s: "
        "%{customdata[2]:,.3f} ms",
        name=LABELS[kind],
        marker={"color": COLORS[kind], "line": {"color": "white", "width": 0.5}},
    )


def stacked_shares(rows: Sequence[Row], kinds: Sequence[str]) -> go.Figure:
    """Shares of the step by kind, a bar per row; each row has a `label`."""
    figure = go.Figure()
    for kind in kinds:
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[row["label"] for row in rows],
                x=[100 * row[kind] for row in rows],
                name=kind,
                marker={"color": TIME[kind]},
                hovertemplate=kind + " %{x:.1f} %<br>%{y}<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", height=150 + 34 * len(rows), legend_traceorder="normal")
    figure.update_xaxes(title="% of the step", range=[0, 100])
    figure.update_yaxes(autorange="reversed")
    return figure


def axis_seconds(by_axis: Mapping[str, Row]) -> go.Figure:
    """Seconds of communication on each axis, measured beside planned."""
    axes = [axis for axis, row in by_axis.items() if row["measured"] or row["planned"]]
    figure = go.Figure()
    for name, color in (("measured", BLUE), ("planned", ORANGE)):
        figure.add_trace(
            go.Bar(
                x=axes,
                y=[1e3 * (by_axis[axis][name] or 0.0) for axis in axes],
                name=name,
                marker={"color": color},
                hovertemplate=name + " %{y:,.3f} ms on %{x}<extra></extra>",
            )
        )
    figure.update_layout(barmode="group", height=300)
    figure.update_yaxes(title="ms of a step")
    return figure


def kernel_bars(kernels: Sequence[Row]) -> go.Figure:
    """Milliseconds of the longest kernels."""
    rows = kernels[:12][::-1]
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=[row["name"][:48] for row in rows],
            x=[1e3 * row["seconds"] for row in rows],
            customdata=[row["calls"] for row in rows],
            marker={"color": BLUE},
            hovertemplate="%{x:,.2f} ms in %{customdata} calls<extra></extra>",
        )
    )
    figure.update_xaxes(title="ms of rank 0's profiled step")
    figure.update_layout(height=120 + 26 * len(rows))
    return figure


def step_bars(seconds: Sequence[float]) -> go.Figure:
    """The length of each timed step."""
    steps = list(range(1, len(seconds) + 1))
    figure = go.Figure(
        go.Bar(
            x=steps,
            y=list(seconds),
            marker={"color": BLUE},
            hovertemplate="step %{x}: %{y:.4f} s<extra></extra>",
        )
    )
    figure.update_xaxes(title="timed step", dtick=1 if len(steps) <= 30 else None)
    figure.update_yaxes(title="seconds", rangemode="tozero")
    figure.update_layout(height=260)
    return figure
