"""Interactive charts of where memory goes: to the process, over a step, and rank by rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from mtcli.core.report.colors import BLUE, DARK, MEMORY, ORANGE

MIB = 2**20
STATE = ("weights", "gradients", "optimizer")
KINDS = (*STATE, "activations")
NEAR = 2.0  # times the process: a limit beyond that is told in words, not drawn

Row = Mapping[str, Any]


def waterfall(measured: Mapping[str, int], planned: Mapping[str, int], limit: float) -> go.Figure:
    """Bytes by kind, one on top of the other, up to the process; a limit of 0 is unknown.

    Of each, what KINDS does not name is `other`: the difference to its process.
    """
    figure = go.Figure()
    for name, color, found in (("measured", BLUE, measured), ("planned", ORANGE, planned)):
        if found:
            figure.add_trace(_steps(name, color, found))
    figure.update_layout(waterfallmode="group", height=400)
    figure.update_yaxes(title="MiB", rangemode="tozero")
    most = max(found["process"] for found in (measured, planned) if found)
    if 0 < limit <= NEAR * most:
        note = f"usable {limit / MIB:,.0f} MiB"
        figure.add_hline(limit / MIB, line={"color": "#d55e00", "dash": "dash"})
        figure.add_annotation(x=0, xref="paper", y=limit / MIB, text=note, showarrow=False)
    return figure


def _steps(name: str, color: str, found: Mapping[str, int]) -> go.Waterfall:
    kinds = [found[kind] for kind in KINDS]
    heights = [*kinds, found["process"] - sum(kinds), found["process"]]
    return go.Waterfall(
        x=[*KINDS, "other", "process"],
        y=[height / MIB for height in heights],
        measure=["relative"] * 5 + ["total"],
        name=name,
        increasing={"marker": {"color": color}},
        decreasing={"marker": {"color": DARK}},
        totals={"marker": {"color": color}},
        hovertemplate=name + " %{x}: %{customdata:,.2f} MiB<extra></extra>",
        customdata=[height / MIB for height in heights],
    )


def over_time(data: Row) -> go.Figure:
    """A rank's MiB by kind over the profiled step, one on top of the other."""
    figure = go.Figure()
    for kind in (*KINDS, "temporary"):
        figure.add_trace(
            go.Scatter(
                x=data["seconds"],
                y=[held / MIB for held in data[kind]],
                name=kind,
                stackgroup="held",
                line={"width": 0.5, "color": MEMORY[kind], "shape": "hv"},
                hovertemplate=kind + " %{y:,.2f} MiB at %{x:.4f} s<extra></extra>",
            )
        )
    figure.update_xaxes(title="seconds of the profiled step", rangemode="tozero")
    figure.update_yaxes(title="MiB", rangemode="tozero")
    figure.update_layout(height=380, legend_traceorder="reversed")
    return figure


def by_rank(rows: Sequence[Row], kinds: Sequence[str]) -> go.Figure:
    """MiB by kind, a bar per row; each row has a `label`."""
    figure = go.Figure()
    for kind in kinds:
        figure.add_trace(
            go.Bar(
                x=[row["label"] for row in rows],
                y=[row.get(kind, 0) / MIB for row in rows],
                name=kind,
                marker={"color": MEMORY[kind]},
                hovertemplate=kind + " %{y:,.2f} MiB<br>%{x}<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", height=340)
    figure.update_yaxes(title="MiB")
    return figure
