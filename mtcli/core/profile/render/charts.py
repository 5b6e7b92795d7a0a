"""Draws profiles and finished runs as charts, from the data of `--json` and from timelines.

In order: time of a step, the curves of a finished run, memory, and maps of ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import nan
from typing import TYPE_CHECKING, Any

from mtcli.core.profile.breakdown import KINDS as TIME_KINDS
from mtcli.core.profile.curves import CURVES, MFU, TASKS, VALIDATION, Curve, histogram, thinned
from mtcli.core.profile.render.drawing import (
    BLUE,
    DARK,
    GREEN,
    LIGHT,
    MOST_NAMES,
    ORANGE,
    PINK,
    RED,
    TEAL,
    WIDTH,
    YELLOW,
    Chart,
    bars,
    boxes,
    legend_above,
    name_ticks,
)
from mtcli.core.schedule.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPS = {"F": BLUE, "B": ORANGE, "I": ORANGE, "W": TEAL}
LABELS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
TIME = dict(zip(TIME_KINDS, (BLUE, ORANGE, PINK, LIGHT, GREEN, YELLOW, DARK), strict=True))
MEMORY = {"weights": BLUE, "gradients": ORANGE, "optimizer": GREEN}
MEMORY |= {"activations": PINK, "temporary": YELLOW, "other": LIGHT}
MOST_SPANS = 4000  # boxes of a page: 1 MB
MOST_LABELLED = 256  # ranks; the map of a larger world tells a rank's coordinates by its tip only
MOST_CELLS = 64  # rows of the matrix; of a larger world, ranks are added up in blocks
NEAR = 2.0  # times the process: a limit beyond that is told in words, not drawn
LETTER = 0.075  # inches of a letter in a box
MIB = 2**20
CLOCK = "seconds since the first op of the step"  # of the measured timeline
STATE = ("weights", "gradients", "optimizer")
KINDS = (*STATE, "activations")
INNER = {"attention": ("dp", "cp", "tp_row", "tp"), "experts": ("edp", "ep", "etp")}
HEAT = ("#fde8a9", "#e6862a", "#7a1f10")
COORDINATES = ("#cfe1f2", "#7fb0db")  # black text is read on all between them

ChartRow = Mapping[str, Any]


def gantt(
    timelines: Mapping[str, Timeline],
    most: int | None = None,
    limits: tuple[float, float] | None = None,
) -> Chart:
    """Draws the timelines' ops on one time axis: for each pipeline rank a row per timeline, and at
    its end the share of the timeline in which the rank is idle.

    Draws at most the first `most` ops of a timeline, by their start. `limits` are the ends of the
    axis, by default those of the ops.
    """
    ranks = max(timeline.num_ranks for timeline in timelines.values())
    names = [f"rank {rank} {name}".strip() for rank in range(ranks) for name in timelines]
    rows = [
        (len(timelines) * span.rank + offset, span)
        for offset, timeline in enumerate(timelines.values())
        for span in timeline.spans
    ]
    rows = sorted(rows, key=lambda row: row[1].start)[:most]
    idle = [
        1.0 - timeline.busy_seconds[rank] / timeline.end if timeline.end else 0.0
        for rank in range(ranks)
        for timeline in timelines.values()
    ]
    ends = limits or (0.0, max((span.end for _, span in rows), default=1.0))
    draw = partial(_gantt, rows=rows, names=names, idle=idle, ends=ends)
    return Chart(0.8 + 0.26 * len(names), draw)


def _gantt(
    axes: "Axes",
    rows: Sequence[tuple[int, Span]],
    names: Sequence[str],
    idle: Sequence[float],
    ends: tuple[float, float],
) -> None:
    length = ends[1] - ends[0]
    kinds = sorted({span.op.kind for _, span in rows}, key=list(LABELS).index)
    for kind in kinds:
        drawn = [
            (span.start, row - 0.4, span.end - span.start, 0.8, _times(span, names[row]))
            for row, span in rows
            if span.op.kind == kind
        ]
        thin = min(0.3, 200 / len(rows))
        boxes(axes, drawn, OPS[kind], label=LABELS[kind], edgecolors="white", linewidths=thin)
    for row, span in rows:
        name, middle = str(span.op), (span.start + span.end) / 2
        if (span.end - span.start) / length * WIDTH > LETTER * (len(name) + 1):
            axes.text(middle, row, name, ha="center", va="center", fontsize=7, color="black")
    name_ticks(axes, names, across=True)
    for row, share in enumerate(idle if len(names) <= MOST_NAMES else ()):
        look: dict[str, Any] = {"va": "center", "fontsize": 7, "clip_on": False}
        axes.text(1.005, row, f"idle {share:.0%}", transform=axes.get_yaxis_transform(), **look)
    axes.set(xlim=ends, xlabel=CLOCK)
    legend_above(axes, len(kinds))


def _times(span: Span, name: str) -> str:
    """Words the times of an op in a row."""
    length = 1e3 * (span.end - span.start)
    return f"{span.op}, {name}\n{span.start:.5f} to {span.end:.5f} s: {length:,.3f} ms"


def stacked_shares(rows: Sequence[ChartRow], kinds: Sequence[str]) -> Chart:
    """Draws shares of the step by kind, a bar per row; each row has a `label`."""

    def draw(axes: "Axes") -> None:
        _stack(axes, rows, {kind: TIME[kind] for kind in kinds}, 100.0, "%", across=True)
        axes.set(xlim=(0, 100), xlabel="% of the step")

    return Chart(0.8 + 0.3 * len(rows), draw)


def _stack(
    axes: "Axes",
    rows: Sequence[ChartRow],
    colors: Mapping[str, str],
    scale: float,
    unit: str,
    across: bool = False,
) -> None:
    """Adds a bar per row, of one box per kind on top of the other, and names both."""
    bases = [0.0] * len(rows)
    for kind, color in colors.items():
        drawn = []
        for place, row in enumerate(rows):
            size = scale * row.get(kind, 0)
            tip = f"{kind} {size:,.2f} {unit}\n{row['label']}"
            drawn.append((place - 0.4, bases[place], size, tip))
            bases[place] += size
        bars(axes, drawn, color, kind, across=across)
    name_ticks(axes, [row["label"] for row in rows], across)
    legend_above(axes, len(colors))


def _groups(
    axes: "Axes", names: Sequence[str], series: Mapping[str, Sequence[float]], unit: str
) -> None:
    """Adds a group of bars per name, of one per series."""
    thickness = 0.8 / len(series)
    for index, (label, sizes) in enumerate(series.items()):
        drawn = [
            (place - 0.4 + thickness * index, 0.0, size, f"{label} {size:,.3f} {unit}\n{name}")
            for place, (name, size) in enumerate(zip(names, sizes, strict=True))
        ]
        bars(axes, drawn, (BLUE, ORANGE)[index], label, thickness)
    name_ticks(axes, names)
    axes.set_ylabel(unit)
    legend_above(axes, len(series))


def axis_seconds(by_axis: Mapping[str, ChartRow]) -> Chart:
    """Draws seconds of communication on each axis, measured and planned."""
    rows = {axis: row for axis, row in by_axis.items() if row["measured"] or row["planned"]}
    series = {
        name: [1e3 * (row[name] or 0.0) for row in rows.values()]
        for name in ("measured", "planned")
    }
    return Chart(2.6, lambda axes: _groups(axes, list(rows), series, "ms of a step"))


def kernel_bars(kernels: Sequence[ChartRow]) -> Chart:
    """Draws milliseconds of the longest kernels."""
    rows = kernels[:12]

    def draw(axes: "Axes") -> None:
        times = [(1e3 * row["seconds"], row["calls"]) for row in rows]
        drawn = [
            (place - 0.4, 0.0, time, f"{time:,.2f} ms in {calls} calls")
            for place, (time, calls) in enumerate(times)
        ]
        bars(axes, drawn, BLUE, across=True)
        name_ticks(axes, [row["name"][:48] for row in rows], across=True)
        axes.set(xlim=(0, None), xlabel="ms of rank 0's profiled step")

    return Chart(0.7 + 0.22 * len(rows), draw)


def step_bars(seconds: Sequence[float]) -> Chart:
    """Draws the length of each timed step."""
    curve = thinned(Curve(list(range(1, len(seconds) + 1)), list(seconds)))

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        rows = zip(*curve, strict=True)
        drawn = [(step - 0.4, 0.0, time, f"step {step}: {time:.4f} s") for step, time in rows]
        bars(axes, drawn, BLUE)
        axes.set(xlabel="timed step", ylabel="seconds", ylim=(0, None))
        axes.set_xlim(0.5, len(seconds) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(15, integer=True))
        axes.grid(axis="y")

    return Chart(2.3, draw)


def curves(curve_of: Mapping[str, ChartRow], resumed: Sequence[int] = ()) -> list[Chart]:
    """Draws each curve {steps, values}; a dotted line where the run resumed."""
    shown = [name for name in CURVES if name in curve_of]
    shown += [name for name in curve_of if name.startswith(TASKS)]
    valid = [name for name in curve_of if name.startswith(VALIDATION)]

    def draw(name: str, axes: "Axes") -> None:
        steps, values = curve_of[name]["steps"], _gaps(curve_of[name])
        axes.plot(steps, values, "-" if len(steps) > 1 else "o", color=BLUE, linewidth=1)
        for step in resumed:
            axes.axvline(step, color=GREEN, linestyle=":", linewidth=1.5)
        for number, label in enumerate(valid if name == shown[0] else ()):
            look: dict[str, Any] = {"ms": 3, "label": label}
            look["color"] = f"C{number + 1}" if number else ORANGE
            axes.plot(curve_of[label]["steps"], _gaps(curve_of[label]), "o-", **look)
        if name == shown[0] and valid:
            legend_above(axes, min(len(valid), 3))
        if name == MFU:
            _mark_above_peak(axes, steps, values)
        axes.set_xlabel("step")
        axes.grid()

    return [Chart(2.4, partial(draw, name), name) for name in shown]


def _mark_above_peak(axes: "Axes", steps: Sequence[int], shares: Sequence[float]) -> None:
    """Marks shares of the peak that no device reaches: its FLOP/s were measured too low."""
    above = [(step, share) for step, share in zip(steps, shares, strict=True) if share > 100.0]
    if above:
        axes.axhline(100.0, color=RED, linestyle="--", linewidth=1)
        label = f"{len(above):,} of {len(steps):,} above 100 %: the peak was measured too low"
        axes.plot(*zip(*above, strict=True), "x", ms=4, color=RED, label=label)
        legend_above(axes, 1)


def _gaps(curve: ChartRow) -> list[float]:
    return [nan if value is None else value for value in curve["values"]]


def step_histogram(seconds: Sequence[float]) -> Chart:
    """Draws the histogram of the steps' lengths."""
    starts, counts, width = histogram(seconds)

    def draw(axes: "Axes") -> None:
        drawn = [
            (start, 0.0, count, f"{count:,} steps of {start:.4g} to {start + width:.4g} s")
            for start, count in zip(starts, counts, strict=True)
        ]
        bars(axes, drawn, BLUE, thickness=width)
        axes.set(xlabel="seconds of a step", ylabel="steps", ylim=(0, None))
        axes.grid(axis="y")

    return Chart(2.3, draw)


def saves(rows: Sequence[ChartRow]) -> Chart:
    """Draws the seconds of each checkpoint: training's stall, and writing."""
    series = {
        "training waited": [row.get("stall_seconds") or 0.0 for row in rows],
        "written in": [row.get("write_seconds") or 0.0 for row in rows],
    }

    def draw(axes: "Axes") -> None:
        _groups(axes, [str(row["step"]) for row in rows], series, "seconds")
        axes.set_xlabel("checkpoint of step")

    return Chart(2.4, draw)


def waterfall(measured: Mapping[str, int], planned: Mapping[str, int], limit: float) -> Chart:
    """Draws bytes by kind as a waterfall, up to those of the process; a limit of 0 is unknown.

    `other` is the difference between the process and the sum of KINDS.
    """
    series = {name: x for name, x in (("measured", measured), ("planned", planned)) if x}
    most = max(sizes["process"] for sizes in series.values())

    def draw(axes: "Axes") -> None:
        thickness = 0.8 / len(series)
        for index, (name, sizes) in enumerate(series.items()):
            parts = [sizes[kind] / MIB for kind in KINDS]
            total = sizes["process"] / MIB
            heights = [*parts, total - sum(parts), total]
            bases = [*accumulate(parts, initial=0.0), 0.0]
            drawn = [
                (place - 0.4 + thickness * index, base, size, f"{name} {size:,.2f} MiB")
                for place, (base, size) in enumerate(zip(bases, heights, strict=True))
            ]
            bars(axes, drawn, (BLUE, ORANGE)[index], name, thickness)
        if 0 < limit <= NEAR * most:
            axes.axhline(limit / MIB, color=RED, linestyle="--")
            axes.text(-0.45, limit / MIB, f"usable {limit / MIB:,.0f} MiB", va="bottom")
        name_ticks(axes, [*KINDS, "other", "process"])
        axes.set(ylabel="MiB", ylim=(0, None))
        legend_above(axes, len(series))

    return Chart(3.4, draw)


def time_limits(data: ChartRow, timelines: Iterable[Timeline]) -> tuple[float, float]:
    """Returns the ends of a time axis that timelines share with a rank's memory over time."""
    last = max(timeline.end for timeline in timelines)
    return min(0.0, *data["seconds"]), max(last, *data["seconds"])


def over_time(data: ChartRow, limits: tuple[float, float] | None = None) -> Chart:
    """Draws a rank's MiB by kind over the step, one on top of the other, by the clock of the
    measured timeline; `limits` are the ends of the axis."""
    layers = {kind: [size / MIB for size in data[kind]] for kind in MEMORY if kind in data}

    def draw(axes: "Axes") -> None:
        colors, step = [MEMORY[kind] for kind in layers], data["seconds"]
        look: dict[str, Any] = {"labels": layers, "colors": colors, "step": "post"}
        axes.stackplot(step, list(layers.values()), linewidth=0, **look)
        axes.set(xlim=limits or (step[0], step[-1]), ylim=(0, None), ylabel="MiB")
        axes.set_xlabel(CLOCK)
        legend_above(axes, len(layers))

    return Chart(3.0, draw)


def by_rank(rows: Sequence[ChartRow], kinds: Sequence[str]) -> Chart:
    """Draws MiB by kind, a bar per row; each row has a `label`."""

    def draw(axes: "Axes") -> None:
        _stack(axes, rows, {kind: MEMORY[kind] for kind in kinds}, 1 / MIB, "MiB")
        axes.set(ylabel="MiB", ylim=(0, None))

    return Chart(2.8, draw)


def grid_map(ranks: Sequence[ChartRow], grid: str) -> Chart:
    """Draws ranks at their coordinates on a grid: a row per pipeline rank, other axes within."""
    rows: dict[int, list[ChartRow]] = {}
    for rank in ranks:
        rows.setdefault(rank[grid]["pp"], []).append(rank)
    inner = [axis for axis in INNER[grid] if axis in ranks[0][grid]]
    return Chart(0.6 + 0.5 * len(rows), partial(_grid_map, rows=rows, grid=grid, inner=inner))


def _grid_map(
    axes: "Axes", rows: Mapping[int, Sequence[ChartRow]], grid: str, inner: Sequence[str]
) -> None:
    cells = [(x, y, rank) for y, row in enumerate(rows.values()) for x, rank in enumerate(row)]
    sizes = {axis: 1 + max(rank[grid][axis] for *_, rank in cells) for axis in inner}
    depth = max(1, sizes[inner[0]] - 1)
    shades = _shades(COORDINATES, [rank[grid][inner[0]] / depth for *_, rank in cells])
    names = [_coordinates(rank, grid, inner) for *_, rank in cells]
    drawn = [
        (x - 0.48, y - 0.46, 0.96, 0.92, f"{name}\n{layers_of(rank)}")
        for name, (x, y, rank) in zip(names, cells, strict=True)
    ]
    boxes(axes, drawn, shades)
    if len(cells) <= MOST_LABELLED:
        columns = max(len(row) for row in rows.values())
        longest = max(len(line) for name in names for line in name.split("\n"))
        size = min(8.0, 0.8 * WIDTH / columns / longest * 72 / 0.6)
        for name, (x, y, _) in zip(names, cells, strict=True):
            axes.text(x, y, name, ha="center", va="center", fontsize=size, color="black")
    labels = [f"pp{pp_rank}: {layers_of(row[0])}" for pp_rank, row in rows.items()]
    name_ticks(axes, labels, across=True)
    axes.grid(visible=False)
    axes.set(xticks=[], xlabel=" ".join(f"{axis}={size}" for axis, size in sizes.items()))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _coordinates(rank: ChartRow, grid: str, inner: Sequence[str]) -> str:
    """Words a rank and its coordinates on two lines."""
    return f"rank {rank['rank']}\n{' '.join(f'{axis}{rank[grid][axis]}' for axis in inner)}"


def _shades(colors: Sequence[str], shares: Sequence[float]) -> Any:
    """Interpolates between colours: the first at 0, the last at 1."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", colors)(list(shares))


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


def heat_map(matrix: Sequence[Sequence[int]], rows: Sequence[ChartRow]) -> Chart:
    """Draws bytes from rank (row) to rank (column), with each axis's bytes in the tips."""
    world = len(matrix)
    block = -(-world // MOST_CELLS)
    count = -(-world // block)
    cells: dict[tuple[int, int], int] = {}
    for sender, given in enumerate(matrix):
        for receiver, bytes_ in enumerate(given):
            if bytes_:
                cell = (sender // block, receiver // block)
                cells[cell] = cells.get(cell, 0) + bytes_
    by_axis: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
    for row in rows:
        axes_of = by_axis.setdefault((row["from"] // block, row["to"] // block), {})
        bytes_, calls = axes_of.get(row["axis"], (0, 0))
        axes_of[row["axis"]] = (bytes_ + row["bytes"], calls + row["calls"])
    names = [f"{rank}-{min(world, rank + block) - 1}" for rank in range(0, world, block)]
    names = names if block > 1 else [str(rank) for rank in range(world)]
    drawn = []
    for (sender, receiver), size in cells.items():
        lines = [f"from {names[sender]} to {names[receiver]}: {size:,} bytes"]
        for axis, (moved, calls) in by_axis.get((sender, receiver), {}).items():
            lines.append(f"{axis}: {moved:,} bytes in {calls} calls")
        drawn.append((receiver - 0.48, sender - 0.48, 0.96, 0.96, "\n".join(lines)))
    most = max(cells.values(), default=1)
    shares = [size / most for size in cells.values()]

    def draw(axes: "Axes") -> None:
        boxes(axes, drawn, _shades(HEAT, shares))
        name_ticks(axes, names)
        name_ticks(axes, names, across=True)
        axes.grid(visible=False)
        axes.set(xlabel=f"to rank; the darkest: {most:,} bytes", ylabel="from rank")
        axes.set(aspect="equal", anchor="W", facecolor="#80808020")
        axes.tick_params(axis="x", rotation=90)

    return Chart(0.8 + min(6.0, 0.24 * max(8, count)), draw)
