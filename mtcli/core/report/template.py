"""The page around the charts: its styles, and the script that draws them where the page is read.

plotly lies in the page once, packed (gzip, base64: 2 MB in place of 5), and the browser unpacks it;
nothing is fetched. Colours follow the reader's light or dark scheme, and print as light.
"""

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from typing import Any, NamedTuple

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --quiet: #5f6368; --line: #d8dadd;
        --paper: #fff; --shade: #f4f5f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --quiet: #a4a8ad; --line: #3c4045;
        --paper: #17181a; --shade: #222427; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1180px;
       padding: 1.2rem clamp(.7rem, 3vw, 2rem) 3rem; color: var(--ink); background: var(--paper); }
h1, p { overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .8rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem; }
p.note { color: var(--quiet); font-size: .92rem; margin: 0 0 .3rem; max-width: 75ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1.2rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
         vertical-align: baseline; }
th:first-child, td:first-child { text-align: left; } th { color: var(--quiet); font-weight: 500; }
pre { background: var(--shade); border-radius: 6px; padding: .8rem; overflow-x: auto;
      font-size: 13px; }
@media print { :root { --ink: #000; --quiet: #444; --line: #bbb; --paper: #fff; --shade: #f4f5f6; }
  body { max-width: none; padding: 0; } section { break-inside: avoid; } .modebar { display: none; }
  pre { white-space: pre-wrap; break-inside: auto; } }
"""

LOADER = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const charts = JSON.parse(document.getElementById("mtcli-charts").textContent);
const config = {displaylogo: false, responsive: true};
const colour = print => ({"font.color": dark.matches && !print ? "#e8e8ea" : "#1d1d1f"});
const recolour = print => { for (const name in charts) Plotly.relayout(name, colour(print)); };
function draw() {
  for (const [name, chart] of Object.entries(charts)) {
    chart.layout.font = {family: "system-ui, sans-serif", size: 13, color: colour()["font.color"]};
    Plotly.newPlot(name, chart.data, chart.layout, config);
  }
  document.documentElement.dataset.drawn = "yes";
  dark.addEventListener("change", () => recolour(false));
  addEventListener("beforeprint", () => recolour(true));
  addEventListener("afterprint", () => recolour(false));
}
async function unpack() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  draw();
}
unpack().catch(error => {
  document.querySelector("h1").insertAdjacentHTML("afterend",
    "<p class=note>The charts need a browser of 2023 or later, with scripts allowed.</p>");
  throw error;
});
"""


class Section(NamedTuple):
    """A heading, what to know when reading it, and HTML or a chart ({data, layout} of plotly)."""

    title: str
    note: str
    html: str = ""
    chart: Mapping[str, Any] | None = None
    name: str = ""  # of the chart in the page: chart-<name>


def document(title: str, sections: Iterable[Section], data: Mapping[str, Any]) -> str:
    """The whole page; `data` is what `--json` holds."""
    sections = list(sections)
    charts = {f"chart-{s.name}": s.chart for s in sections if s.chart is not None}
    return "".join(
        (
            "<!doctype html><html lang=en><head><meta charset=utf-8>",
            "<meta name=viewport content='width=device-width, initial-scale=1'>",
            f"<title>{escape(title)}</title><link rel=icon href='data:,'>",
            f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
            *map(_section, sections),
            f"<script type='application/json' id='mtcli-data'>{embedded(data)}</script>\n",
            f"<script type='application/json' id='mtcli-charts'>{embedded(charts)}</script>\n",
            f"<script type='text/plain' id='plotly'>{_packed_plotly()}</script>",
            f"<script>{LOADER}</script></body></html>\n",
        )
    )


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose first column names its rows."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def embedded(data: object) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _section(section: Section) -> str:
    note = f"<p class=note>{escape(section.note)}</p>" if section.note else ""
    chart = f"<div id='chart-{section.name}'></div>" if section.chart is not None else ""
    heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    return f"<section>{heading}{note}{section.html}{chart}</section>"
