"""Interactive charts of a profile or a run, as plotly figures made from plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mtcli.core.cost.plot import COLORS, LABELS
from mtcli.core.schedule.timeline import Span, Timeline
from mtcli.core.spec.layout import ParallelLayout

MIB = 2**20
MOST_LABELLED = 256  # ranks; the map of a larger world tells a rank's place on hover only
PALETTE = ("#4c78a8", "#f58518", "#e45756", "#bab0ac", "#54a24b", "#b279a2", "#eeca3b")

Row = Mapping[str, Any]


def gantt(timelines: Mapping[str, Timeline]) -> go.Figure:
    """The timelines' ops on one time axis: for each pipeline rank a row per timeline."""
    figure = go.Figure()
    ranks = max(timeline.num_ranks for timeline in timelines.values())
    order = [f"rank {rank} {name}" for rank in range(ranks) for name in timelines]
    rows = [(name, span) for name, timeline in timelines.items() for span in timeline.spans]
    for kind in sorted({span.op.kind for _, span in rows}, reverse=True):
        figure.add_trace(_bars(kind, [row for row in rows if row[1].op.kind == kind]))
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1])
    figure.update_xaxes(title="seconds since the first op of the step")
    figure.update_layout(barmode="overlay", bargap=0.25, height=140 + 34 * len(order))
    return figure


def _bars(kind: str, rows: Sequence[tuple[str, Span]]) -> go.Bar:
    return go.Bar(
        orientation="h",
        y=[f"rank {span.rank} {name}" for name, span in rows],
        base=[span.start for _, span in rows],
        x=[span.end - span.start for _, span in rows],
        customdata=[(str(span.op), span.end) for _, span in rows],
        hovertemplate="%{customdata[0]}: %{base:.5f} to %{customdata[1]:.5f} s<br>%{y}",
        name=LABELS[kind],
        marker={"color": COLORS[kind], "line": {"color": "white", "width": 0.5}},
    )


def stacked_shares(rows: Sequence[Row], kinds: Sequence[str]) -> go.Figure:
    """Shares of the step by kind, a bar per pipeline rank."""
    figure = go.Figure()
    for kind, color in zip(kinds, PALETTE, strict=True):
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[f"rank {row['pp_rank']}" for row in rows],
                x=[100 * row[kind] for row in rows],
                name=kind,
                marker={"color": color},
                hovertemplate=kind + " %{x:.1f} %<br>%{y}",
            )
        )
    figure.update_layout(barmode="stack", height=230 + 34 * len(rows), legend_traceorder="normal")
    figure.update_xaxes(title="% of the step", range=[0, 100])
    figure.update_yaxes(autorange="reversed")
    return figure


def memory_bars(rows: Sequence[Row], kinds: Sequence[str]) -> go.Figure:
    """MiB by kind, a bar per row; each row has a `label`."""
    figure = go.Figure()
    for kind, color in zip(kinds, PALETTE, strict=False):
        figure.add_trace(
            go.Bar(
                x=[row["label"] for row in rows],
                y=[row.get(kind, 0) / MIB for row in rows],
                name=kind,
                marker={"color": color},
                hovertemplate=kind + " %{y:,.2f} MiB<br>%{x}",
            )
        )
    figure.update_layout(barmode="stack", height=380)
    figure.update_yaxes(title="MiB")
    return figure


def memory_curve(points: Sequence[tuple[float, int]]) -> go.Figure:
    """Bytes above those held when the step began, over the profiled step."""
    figure = go.Figure(
        go.Scatter(
            x=[moment for moment, _ in points],
            y=[held / MIB for _, held in points],
            fill="tozeroy",
            line={"color": PALETTE[0], "width": 1},
            hovertemplate="%{y:,.2f} MiB at %{x:.4f} s<extra></extra>",
        )
    )
    figure.update_xaxes(title="seconds of the profiled step")
    figure.update_yaxes(title="MiB above the step's begin")
    figure.update_layout(height=320)
    return figure


def kernel_bars(kernels: Sequence[Row]) -> go.Figure:
    """Milliseconds of the longest kernels."""
    rows = kernels[:12][::-1]
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=[row["name"][:56] for row in rows],
            x=[1e3 * row["seconds"] for row in rows],
            customdata=[row["calls"] for row in rows],
            marker={"color": PALETTE[0]},
            hovertemplate="%{x:,.2f} ms in %{customdata} calls<extra></extra>",
        )
    )
    figure.update_xaxes(title="ms of rank 0's profiled step")
    figure.update_layout(height=120 + 26 * len(rows))
    return figure


def curves(rows: Sequence[Row]) -> go.Figure:
    """Loss, gradient norm, tokens/s and MFU over the steps, on one step axis."""
    shown = {
        "loss": [row["loss"] for row in rows],
        "gradient norm": [row["grad_norm"] for row in rows],
        "tokens/s": [row["tokens_per_second"] for row in rows],
        "MFU (%)": [100 * row["mfu"] for row in rows],
    }
    titles = list(shown)
    figure = make_subplots(
        rows=2, cols=2, shared_xaxes="all", subplot_titles=titles, vertical_spacing=0.12
    )
    steps = [row["step"] for row in rows]
    for place, (name, values) in enumerate(shown.items()):
        line = go.Scatter(x=steps, y=values, name=name, line={"color": PALETTE[place % 2]})
        line.showlegend = name == "loss"
        figure.add_trace(line, row=place // 2 + 1, col=place % 2 + 1)
    valid = [(row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row]
    if valid:
        at, losses = zip(*valid, strict=True)
        line = go.Scatter(x=at, y=losses, name="validation loss", line={"color": PALETTE[2]})
        figure.add_trace(line, row=1, col=1)
    figure.update_xaxes(title="step", row=2)
    figure.update_layout(height=620, showlegend=bool(valid))
    return figure


def step_bars(seconds: Sequence[float]) -> go.Figure:
    """The length of each timed step."""
    steps = list(range(1, len(seconds) + 1))
    figure = go.Figure(
        go.Bar(x=steps, y=list(seconds), marker={"color": PALETTE[0]}, hovertemplate="%{y:.4f} s")
    )
    figure.update_xaxes(title="timed step", dtick=1 if len(steps) <= 30 else None)
    figure.update_yaxes(title="seconds")
    figure.update_layout(height=300)
    return figure


def layout_map(layout: ParallelLayout) -> go.Figure:
    """Every rank at its place: a row per pipeline rank, and tp, cp and dp within it."""
    places = [layout.attention.coordinates(rank) for rank in range(layout.world)]
    width = layout.world // layout.pp
    texts = [
        f"rank {rank}<br>" + " ".join(f"{axis}{place[axis]}" for axis in ("dp", "cp", "tp"))
        for rank, place in enumerate(places)
    ]
    grid = range(0, layout.world, width)
    figure = go.Figure(
        go.Heatmap(
            z=[[places[rank]["dp"] for rank in range(row, row + width)] for row in grid],
            text=[texts[row : row + width] for row in grid],
            texttemplate="%{text}" if layout.world <= MOST_LABELLED else None,
            hovertemplate="%{text}<br>%{y}<extra></extra>",
            y=[f"pp{pp}" for pp in range(layout.pp)],
            xgap=3,
            ygap=3,
            zmin=0,
            zmax=max(1, layout.dp - 1),
            colorscale=[[0, "#dbe9f6"], [1, "#6baed6"]],
            showscale=False,
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(showticklabels=False, title=f"tp={layout.tp} cp={layout.cp} dp={layout.dp}")
    figure.update_layout(height=110 + 56 * layout.pp)
    return figure
