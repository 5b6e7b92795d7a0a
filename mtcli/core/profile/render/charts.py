"""Draws interactive charts as plotly figures, from the data of `--json` and from timelines.

In order: time of a step, the curves of a finished run, memory, and maps of ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mtcli.core.profile.curves import CURVES, histogram
from mtcli.core.profile.render.pictures import (
    BLUE,
    DARK,
    GREEN,
    LABELS,
    MEMORY,
    OPS,
    ORANGE,
    TIME,
    memory_layers,
)
from mtcli.core.schedule.timeline import Timeline

MOST_SPANS = 6000  # bars that a browser draws and zooms without a pause
MOST_NAMED = 400  # bars that have room for a name inside
MOST_LABELLED = 256  # ranks; the map of a larger world tells a rank's place on hover only
MOST_CELLS = 128  # rows of the matrix; of a larger world, ranks are added up in blocks
NEAR = 2.0  # times the process: a limit beyond that is told in words, not drawn
MIB = 2**20
STATE = ("weights", "gradients", "optimizer")
KINDS = (*STATE, "activations")
INNER = {"attention": ("dp", "cp", "tp_row", "tp"), "experts": ("edp", "ep", "etp")}
HEAT = ((0.0, "rgba(128, 128, 128, 0.12)"), (1e-9, "#fde8a9"), (0.5, "#e6862a"), (1.0, "#7a1f10"))
PLACES = ((0.0, "#cfe1f2"), (1.0, "#7fb0db"))  # dark text is read on all of them

ChartRow = Mapping[str, Any]


def _bar(
    labels: Sequence[Any], values: Sequence[Any], color: str, hover: str, **more: Any
) -> go.Bar:
    """Draws bars upwards from their labels; with orientation="h", to the right."""
    x, y = (values, labels) if more.get("orientation") == "h" else (labels, values)
    return go.Bar(x=x, y=y, marker={"color": color}, hovertemplate=hover, **more)


def gantt(timelines: Mapping[str, Timeline]) -> go.Figure:
    """Draws the timelines' ops on one time axis: for each pipeline rank a row per timeline.

    Of longer timelines the first MOST_SPANS ops by their start.
    """
    figure = go.Figure()
    ranks = max(timeline.num_ranks for timeline in timelines.values())
    order = [f"rank {rank} {name}" for rank in range(ranks) for name in timelines]
    rows = [(name, span) for name, timeline in timelines.items() for span in timeline.spans]
    rows = sorted(rows, key=lambda row: row[1].start)[:MOST_SPANS]
    for kind in sorted({span.op.kind for _, span in rows}, reverse=True):
        drawn = [(name, span, span.end - span.start) for name, span in rows if span.op.kind == kind]
        figure.add_bar(
            orientation="h",
            y=[f"rank {span.rank} {name}" for name, span, _ in drawn],
            base=[span.start for _, span, _ in drawn],
            x=[seconds for *_, seconds in drawn],
            customdata=[(str(span.op), span.end, 1e3 * seconds) for _, span, seconds in drawn],
            hovertemplate="%{customdata[0]}, %{y}<br>%{base:.5f} to %{customdata[1]:.5f} s: "
            "%{customdata[2]:,.3f} ms",
            name=LABELS[kind],
            marker={"color": OPS[kind], "line": {"color": "white", "width": 0.5}},
        )
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
    return figure.update_layout(
        barmode="overlay",
        bargap=0.25,
        height=150 + 30 * len(order),
        uniformtext={"mode": "hide", "minsize": 9},
        dragmode="zoom",
    )


def stacked_shares(rows: Sequence[ChartRow], kinds: Sequence[str]) -> go.Figure:
    """Draws shares of the step by kind, a bar per row; each row has a `label`."""
    labels, figure = [row["label"] for row in rows], go.Figure()
    for kind in kinds:
        shares, hover = [100 * row[kind] for row in rows], " %{x:.1f} %<br>%{y}<extra></extra>"
        figure.add_trace(_bar(labels, shares, TIME[kind], kind + hover, name=kind, orientation="h"))
    figure.update_layout(barmode="stack", height=150 + 34 * len(rows), legend_traceorder="normal")
    figure.update_xaxes(title="% of the step", range=[0, 100])
    return figure.update_yaxes(autorange="reversed")


def axis_seconds(by_axis: Mapping[str, ChartRow]) -> go.Figure:
    """Draws seconds of communication on each axis, measured beside planned."""
    axes = [axis for axis, row in by_axis.items() if row["measured"] or row["planned"]]
    figure = go.Figure()
    for name, color in (("measured", BLUE), ("planned", ORANGE)):
        seconds = [1e3 * (by_axis[axis][name] or 0.0) for axis in axes]
        hover = name + " %{y:,.3f} ms on %{x}<extra></extra>"
        figure.add_trace(_bar(axes, seconds, color, hover, name=name))
    return figure.update_layout(barmode="group", height=300, yaxis_title="ms of a step")


def kernel_bars(kernels: Sequence[ChartRow]) -> go.Figure:
    """Draws milliseconds of the longest kernels."""
    rows = kernels[:12][::-1]
    names, seconds = [row["name"][:48] for row in rows], [1e3 * row["seconds"] for row in rows]
    hover, calls = "%{x:,.2f} ms in %{customdata} calls<extra></extra>", [r["calls"] for r in rows]
    figure = go.Figure(_bar(names, seconds, BLUE, hover, orientation="h", customdata=calls))
    figure.update_xaxes(title="ms of rank 0's profiled step")
    return figure.update_layout(height=120 + 26 * len(rows))


def step_bars(seconds: Sequence[float]) -> go.Figure:
    """Draws the length of each timed step."""
    steps = list(range(1, len(seconds) + 1))
    hover = "step %{x}: %{y:.4f} s<extra></extra>"
    figure = go.Figure(_bar(steps, list(seconds), BLUE, hover))
    figure.update_xaxes(title="timed step", dtick=1 if len(steps) <= 30 else None)
    figure.update_yaxes(title="seconds", rangemode="tozero")
    return figure.update_layout(height=260)


def curves(told: Mapping[str, ChartRow], resumed: Sequence[int] = ()) -> go.Figure:
    """Draws {curve: {steps, values}} on one step axis; a line where the run resumed."""
    shown = {name: curve for name, curve in told.items() if name in CURVES}
    height = -(-len(shown) // 2)
    figure = make_subplots(
        rows=height,
        cols=2,
        shared_xaxes="all",
        subplot_titles=list(shown),
        vertical_spacing=0.1,
        horizontal_spacing=0.09,
    )
    for index, (name, curve) in enumerate(shown.items()):
        line = go.Scatter(x=curve["steps"], y=curve["values"], name=name, line={"color": BLUE})
        line.update(showlegend=False, mode="lines" if len(curve["steps"]) > 1 else "markers")
        figure.add_trace(line, row=index // 2 + 1, col=index % 2 + 1)
    valid = told.get("validation loss")
    if valid:
        line = go.Scatter(x=valid["steps"], y=valid["values"], name="validation loss")
        line.update(mode="lines+markers", line={"color": ORANGE})
        figure.add_trace(line, row=1, col=1)
    for step in resumed:
        figure.add_vline(step, line={"color": GREEN, "dash": "dot", "width": 1.5})
    figure.update_xaxes(title="step", row=height)
    return figure.update_layout(height=90 + 230 * height, showlegend=bool(valid))


def step_histogram(seconds: Sequence[float]) -> go.Figure:
    """Draws the histogram of the steps' lengths."""
    starts, counts, width = histogram(seconds)
    middles, hover = [start + width / 2 for start in starts], "%{y:,} steps of about %{x:.4g} s"
    figure = go.Figure(_bar(middles, counts, BLUE, hover + "<extra></extra>", width=width))
    figure.update_xaxes(title="seconds of a step")
    return figure.update_layout(height=280, bargap=0, yaxis_title="steps")


def saves(rows: Sequence[ChartRow]) -> go.Figure:
    """Draws, per checkpoint, the seconds that training stood still beside those of its writing."""
    steps, figure = [str(row["step"]) for row in rows], go.Figure()
    for name, key, color in (
        ("training stood still", "stall_seconds", ORANGE),
        ("written in", "write_seconds", BLUE),
    ):
        hover = name + " %{y:.3f} s<br>step %{x}<extra></extra>"
        figure.add_trace(_bar(steps, [row.get(key) for row in rows], color, hover, name=name))
    figure.update_xaxes(title="checkpoint of step", type="category")
    return figure.update_layout(barmode="group", height=280, yaxis_title="seconds")


def waterfall(measured: Mapping[str, int], planned: Mapping[str, int], limit: float) -> go.Figure:
    """Draws bytes by kind, one on top of the other, up to the process; a limit of 0 is unknown.

    Of each, what KINDS does not name is `other`: the difference to its process.
    """
    figure = go.Figure()
    for name, color, sizes in (("measured", BLUE, measured), ("planned", ORANGE, planned)):
        if not sizes:
            continue
        kinds = [sizes[kind] for kind in KINDS]
        heights = [*kinds, sizes["process"] - sum(kinds), sizes["process"]]
        figure.add_waterfall(
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
    figure.update_layout(waterfallmode="group", height=400)
    figure.update_yaxes(title="MiB", rangemode="tozero")
    most = max(sizes["process"] for sizes in (measured, planned) if sizes)
    if 0 < limit <= NEAR * most:
        note = f"usable {limit / MIB:,.0f} MiB"
        figure.add_hline(limit / MIB, line={"color": "#d55e00", "dash": "dash"})
        figure.add_annotation(x=0, xref="paper", y=limit / MIB, text=note, showarrow=False)
    return figure


def over_time(data: ChartRow) -> go.Figure:
    """Draws a rank's MiB by kind over the profiled step, one on top of the other."""
    figure = go.Figure()
    for kind, layer in memory_layers(data).items():
        figure.add_scatter(
            x=data["seconds"],
            y=layer,
            name=kind,
            stackgroup="held",
            line={"width": 0.5, "color": MEMORY[kind], "shape": "hv"},
            hovertemplate=kind + " %{y:,.2f} MiB at %{x:.4f} s<extra></extra>",
        )
    figure.update_xaxes(title="seconds of the profiled step", rangemode="tozero")
    figure.update_yaxes(title="MiB", rangemode="tozero")
    return figure.update_layout(height=380, legend_traceorder="reversed")


def by_rank(rows: Sequence[ChartRow], kinds: Sequence[str]) -> go.Figure:
    """Draws MiB by kind, a bar per row; each row has a `label`."""
    labels, figure = [row["label"] for row in rows], go.Figure()
    for kind in kinds:
        sizes, hover = [row.get(kind, 0) / MIB for row in rows], " %{y:,.2f} MiB<br>%{x}"
        hover = f"{kind}{hover}<extra></extra>"
        figure.add_trace(_bar(labels, sizes, MEMORY[kind], hover, name=kind))
    return figure.update_layout(barmode="stack", height=340, yaxis_title="MiB")


def grid_map(ranks: Sequence[ChartRow], grid: str) -> go.Figure:
    """Draws ranks at their coordinates on a grid: a row per pipeline rank, other axes within."""
    rows: dict[int, list[ChartRow]] = {}
    for rank in ranks:
        rows.setdefault(rank[grid]["pp"], []).append(rank)
    axes = [axis for axis in INNER[grid] if axis in ranks[0][grid]]

    def label(rank: ChartRow) -> str:
        places = " ".join(f"{axis}{rank[grid][axis]}" for axis in axes)
        return f"rank {rank['rank']}<br>{places}"

    figure = go.Figure()
    figure.add_heatmap(
        z=[[rank[grid][axes[0]] for rank in row] for row in rows.values()],
        text=[[label(rank) for rank in row] for row in rows.values()],
        customdata=[[layers_of(rank) for rank in row] for row in rows.values()],
        texttemplate="%{text}" if len(ranks) <= MOST_LABELLED else None,
        textfont={"color": "#1d1d1f"},
        hovertemplate="%{text}<br>%{y}<br>%{customdata}<extra></extra>",
        y=[f"pp{pp_rank}: {layers_of(row[0])}" for pp_rank, row in rows.items()],
        xgap=3,
        ygap=3,
        colorscale=PLACES,
        showscale=False,
    )
    sizes = " ".join(f"{axis}={1 + max(r[grid][axis] for r in ranks)}" for axis in axes)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(showticklabels=False, ticks="", showgrid=False, title=sizes)
    return figure.update_layout(height=110 + 56 * len(rows))


def layers_of(rank: ChartRow) -> str:
    """Words a rank's layers, such as "layers 0-3, 8-11"."""
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


def heat_map(matrix: Sequence[Sequence[int]], rows: Sequence[ChartRow]) -> go.Figure:
    """Draws bytes from rank (row) to rank (column), with each axis's bytes on hover."""
    world = len(matrix)
    block = -(-world // MOST_CELLS)
    count = -(-world // block)
    cells = [[0] * count for _ in range(count)]
    for sender, given in enumerate(matrix):
        for receiver, bytes_ in enumerate(given):
            cells[sender // block][receiver // block] += bytes_
    told: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
    for row in rows:
        axes = told.setdefault((row["from"] // block, row["to"] // block), {})
        bytes_, calls = axes.get(row["axis"], (0, 0))
        axes[row["axis"]] = (bytes_ + row["bytes"], calls + row["calls"])

    def words(sender: int, receiver: int) -> str:
        axes = told.get((sender, receiver), {}).items()
        lines = [f"{axis}: {size:,} bytes in {calls} calls" for axis, (size, calls) in axes]
        return "<br>".join(lines) or "nothing"

    names = [f"{rank}-{min(world, rank + block) - 1}" for rank in range(0, world, block)]
    names = names if block > 1 else [str(rank) for rank in range(world)]
    figure = go.Figure()
    figure.add_heatmap(
        z=cells,
        x=names,
        y=names,
        text=[[words(a, b) for b in range(count)] for a in range(count)],
        hovertemplate="from %{y} to %{x}: %{z:,} bytes<br>%{text}<extra></extra>",
        colorscale=HEAT,
        zmin=0,
        xgap=1,
        ygap=1,
        colorbar={"title": "bytes", "exponentformat": "SI"},
    )
    figure.update_xaxes(title="to rank", type="category", showgrid=False, constrain="domain")
    figure.update_yaxes(title="from rank", type="category", autorange="reversed", showgrid=False)
    return figure.update_layout(height=160 + min(560, max(160, 22 * count)))
