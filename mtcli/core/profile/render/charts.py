"""Interactive charts of where a step's time goes, as plotly figures made from plain data.

Interactive charts of a finished run: its curves over the steps, step times and saves.

Interactive charts of where memory goes: to the process, over a step, and rank by rank.

Maps of ranks: who sits where on both grids, and who gives whom how many bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mtcli.core.profile.finished_run import CURVES, histogram
from mtcli.core.profile.render.colors import (
    BLUE,
    DARK,
    GREEN,
    GRID,
    HEAT,
    MEMORY,
    ORANGE,
    PLACES,
    TIME,
)
from mtcli.core.profile.render.pictures import COLORS, LABELS
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


MIB = 2**20
STATE = ("weights", "gradients", "optimizer")
KINDS = (*STATE, "activations")
NEAR = 2.0  # times the process: a limit beyond that is told in words, not drawn


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


MOST_LABELLED = 256  # ranks; the map of a larger world tells a rank's place on hover only
MOST_CELLS = 128  # rows of the matrix; of a larger world, ranks are added up in blocks
INNER = {"attention": ("dp", "cp", "tp"), "experts": ("edp", "ep", "etp")}


def grid_map(ranks: Sequence[Row], grid: str) -> go.Figure:
    """Every rank at its place on a grid: a row per pipeline rank, and the other axes within it."""
    rows: dict[int, list[Row]] = {}
    for one in ranks:
        rows.setdefault(one[grid]["pp"], []).append(one)
    outer = INNER[grid][0]
    figure = go.Figure(
        go.Heatmap(
            z=[[one[grid][outer] for one in row] for row in rows.values()],
            text=[[_place(one, grid) for one in row] for row in rows.values()],
            customdata=[[layers_of(one) for one in row] for row in rows.values()],
            texttemplate="%{text}" if len(ranks) <= MOST_LABELLED else None,
            textfont={"color": "#1d1d1f"},
            hovertemplate="%{text}<br>%{y}<br>%{customdata}<extra></extra>",
            y=[f"pp{place}: {layers_of(row[0])}" for place, row in rows.items()],
            xgap=3,
            ygap=3,
            colorscale=PLACES,
            showscale=False,
        )
    )
    sizes = " ".join(f"{axis}={1 + max(r[grid][axis] for r in ranks)}" for axis in INNER[grid])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(showticklabels=False, ticks="", showgrid=False, title=sizes)
    figure.update_layout(height=110 + 56 * len(rows))
    return figure


def layers_of(rank: Row) -> str:
    """A rank's layers in words, such as "layers 0-3, 8-11"."""
    runs: list[list[int]] = []
    for layer in rank["layers"]:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    if not runs:
        return "no layers"
    words = ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)
    return f"layers {words}" if len(rank["layers"]) > 1 else f"layer {words}"


def heat_map(matrix: Sequence[Sequence[int]], rows: Sequence[Row]) -> go.Figure:
    """Bytes from rank (row) to rank (column); what each axis moves is told on hover."""
    block = -(-len(matrix) // MOST_CELLS)
    count = -(-len(matrix) // block)
    cells = [[0] * count for _ in range(count)]
    for sender, given in enumerate(matrix):
        for receiver, bytes_ in enumerate(given):
            cells[sender // block][receiver // block] += bytes_
    told: dict[tuple[int, int], dict[str, list[int]]] = {}
    for row in rows:
        axes = told.setdefault((row["from"] // block, row["to"] // block), {})
        bytes_, calls = axes.get(row["axis"], (0, 0))
        axes[row["axis"]] = [bytes_ + row["bytes"], calls + row["calls"]]
    names = [_block(place, block, len(matrix)) for place in range(count)]
    figure = go.Figure(
        go.Heatmap(
            z=cells,
            x=names,
            y=names,
            text=[[_axes(told.get((a, b), {})) for b in range(count)] for a in range(count)],
            hovertemplate="from %{y} to %{x}: %{z:,} bytes<br>%{text}<extra></extra>",
            colorscale=HEAT,
            zmin=0,
            xgap=1,
            ygap=1,
            colorbar={"title": "bytes", "exponentformat": "SI"},
        )
    )
    figure.update_xaxes(title="to rank", type="category", showgrid=False, constrain="domain")
    figure.update_yaxes(title="from rank", type="category", autorange="reversed", showgrid=False)
    figure.update_layout(height=160 + min(560, max(160, 22 * count)))
    return figure


def _place(one: Row, grid: str) -> str:
    places = " ".join(f"{axis}{one[grid][axis]}" for axis in INNER[grid])
    return f"rank {one['rank']}<br>{places}"


def _block(place: int, block: int, world: int) -> str:
    last = min(world, (place + 1) * block) - 1
    return str(place) if block == 1 else f"{place * block}-{last}"


def _axes(axes: Mapping[str, Sequence[int]]) -> str:
    told = [f"{axis}: {size:,} bytes in {calls} calls" for axis, (size, calls) in axes.items()]
    return "<br>".join(told) or "nothing"
