"""Draws charts with matplotlib, once for all outputs: a picture, or an SVG element of a page.

A `Chart` draws on axes that the caller gives, alone or in a picture of several. Text and lines have
the colour INK, which a page replaces by the reader's text colour: light on a dark screen. A box has
a tip, which a browser shows when the pointer rests on the box.

Colour-blind readers can distinguish the colours, on light and dark. All but the greys for idle are
of Okabe and Ito's set (jfly.uni-koeln.de/color).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from mtcli.core.runtime.atomic_writes import aside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PINK = "#4c78a8", "#f58518", "#009e73", "#cc79a7"
YELLOW, TEAL, LIGHT, DARK = "#e6c229", "#72b7b2", "#bab0ac", "#7a7a7a"
RED = "#d55e00"
INK = "#1d1d1f"
WIDTH = 11.0  # inches
STYLE = {
    "text.color": INK,
    "text.parse_math": False,  # a kernel's name may have a $
    "axes.labelcolor": INK,
    "axes.edgecolor": DARK,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.color": DARK,
    "grid.alpha": 0.25,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # text stays text, in the reader's font
}
TIP = "tip:"  # begins the link that matplotlib writes for a box, which becomes its tip
COUNTED = ("step", "timed step", "steps")  # labels of axes of whole numbers
MOST_NAMES, MOST_LETTERS = 32, 140  # labels that an axis has room for

Box = tuple[float, float, float, float, str]  # left, lower, width, height, tip
Bar = tuple[float, float, float, str]  # start along the axis of names, base, size, tip


class Chart(NamedTuple):
    """A chart: its height in inches, the function that draws it, and a title in a picture."""

    height: float
    draw: "Callable[[Axes], None]"
    title: str = ""


def save(
    target: str | Path, charts: Sequence[Chart], columns: int = 1, width: float = WIDTH
) -> None:
    """Writes charts as one picture; the suffix says which kind.

    Raises MtcliError (exit 1) where the file cannot be written.
    """
    with aside(target) as path:
        if path.suffix == ".svg":
            path.write_text(svg(charts, columns, width), encoding="utf-8")
        else:
            _render(path, charts, columns, width, dpi=150)


def svg(charts: Sequence[Chart], columns: int = 1, width: float = WIDTH, name: str = "") -> str:
    """Returns charts as one SVG element, with ids that are unique to `name`."""
    file = StringIO()
    _render(file, charts, columns, width, name, format="svg", transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # what nothing in it refers to
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    text = re.sub(f'<a xlink:href="{TIP}([^"]*)"[^>]*>', r"<g><title>\1</title>", text)
    return text.replace("</a>", "</g>")


def _render(
    file: Path | IO[str],
    charts: Sequence[Chart],
    columns: int,
    width: float,
    name: str = "",
    **options: Any,
) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = [charts[first : first + columns] for first in range(0, len(charts), columns)]
    heights = [max(chart.height for chart in row) for row in rows]
    style: Any = STYLE | {"svg.hashsalt": name}  # matplotlib's type is a Literal of every key
    with rc_context(style):
        figure = Figure(figsize=(width, sum(heights)), layout="constrained")
        grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
        for place, chart in enumerate(charts):
            axes = figure.add_subplot(grid[place // columns, place % columns])
            axes.set_title(chart.title)
            chart.draw(axes)
            plain_ticks(axes)
        figure.savefig(file, **options)


def plain_ticks(axes: "Axes") -> None:
    """Labels the ticks of logarithmic axes without TeX, and those of steps by whole numbers."""
    from matplotlib.ticker import AutoLocator, LogFormatter, LogLocator, MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        locator = axis.get_major_locator()
        if isinstance(locator, LogLocator):
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        elif isinstance(locator, AutoLocator) and axis.get_label_text() in COUNTED:
            axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def boxes(axes: "Axes", rows: Iterable[Box], colors: Any, **look: Any) -> None:
    """Adds boxes, all of one colour or each of its own."""
    from matplotlib.collections import PolyCollection

    rows = list(rows)
    corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h, _ in rows]
    urls = [TIP + tip for *_, tip in rows]
    axes.add_collection(PolyCollection(corners, facecolors=colors, urls=urls, **look))
    axes.autoscale_view()


def bars(
    axes: "Axes",
    rows: Iterable[Bar],
    color: str,
    label: str | None = None,
    thickness: float = 0.8,
    across: bool = False,
) -> None:
    """Adds bars upwards from their bases, or to the right where they lie `across`."""
    if across:
        drawn = [(base, start, size, thickness, tip) for start, base, size, tip in rows]
    else:
        drawn = [(start, base, thickness, size, tip) for start, base, size, tip in rows]
    boxes(axes, drawn, color, label=label)


def name_ticks(axes: "Axes", names: Sequence[str], across: bool = False) -> None:
    """Names the bars 0, 1, ... of an axis, or every n-th of many; `across` from the top."""
    most = MOST_NAMES if across else max(1, MOST_LETTERS // (max(map(len, names), default=0) + 3))
    shown = range(0, len(names), -(-len(names) // most) or 1)
    labels = [names[place] for place in shown]
    if across:
        axes.set_yticks(shown, labels)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x")
    else:
        axes.set_xticks(shown, labels)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.grid(axis="y")


def legend_above(axes: "Axes", count: int) -> None:
    """Puts a legend of one row over the right end of the axes."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=count, borderaxespad=0.2)
