"""Maps of ranks: who sits where on both grids, and who gives whom how many bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from mtcli.core.report.colors import HEAT, PLACES

MOST_LABELLED = 256  # ranks; the map of a larger world tells a rank's place on hover only
MOST_CELLS = 128  # rows of the matrix; of a larger world, ranks are added up in blocks
INNER = {"attention": ("dp", "cp", "tp"), "experts": ("edp", "ep", "etp")}

Row = Mapping[str, Any]


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
