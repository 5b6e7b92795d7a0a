"""Writes an HTML page of sections with charts, to be read offline. Imports no torch.

The figures of `--json` lie in the page as well, in the element `mtcli-data`. Charts are SVG in the
page itself, so it needs no scripts, but for a slider that enlarges the timeline. Colours follow the
reader's light or dark scheme, and print as light.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from mtcli.core.profile.render.drawing import Chart, svg
from mtcli.core.runtime.atomic_writes import aside

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
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1.2rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
         vertical-align: baseline; }
th:first-child, td:first-child { text-align: left; } th { color: var(--quiet); font-weight: 500; }
pre { background: var(--shade); border-radius: 6px; padding: .8rem; overflow-x: auto;
      font-size: 13px; }
svg { display: block; width: 100%; min-width: 640px; height: auto; }
.wide { overflow: auto; max-height: 90vh; }
@media print { :root { --ink: #000; --quiet: #444; --line: #bbb; --paper: #fff; --shade: #f4f5f6; }
  body { max-width: none; padding: 0; } section { break-inside: avoid; } label { display: none; }
  pre { white-space: pre-wrap; break-inside: auto; } }
"""

ZOOM = """<label class=note>enlarge <input type=range min=100 max=2000 value=100 oninput=\
"this.parentNode.nextSibling.firstChild.style.width=this.value+'%'"></label>"""


class PageSection(NamedTuple):
    """A heading, what to know when reading it, and HTML."""

    title: str
    note: str
    html: str


def chart(name: str, title: str, note: str, *drawn: Chart, columns: int = 1) -> PageSection:
    """A section with charts, in an element of the name chart-<name>."""
    zoom = ZOOM if name == "pipeline" else ""
    html = f"{zoom}<div class=wide id='chart-{name}'>{svg(drawn, columns, name=name)}</div>"
    return PageSection(title, note, html)


def write_page(
    target: str, title: str, sections: Sequence[PageSection], data: Mapping[str, Any]
) -> None:
    """Writes a page, or nothing; `data` is the JSON of `--json`."""
    parts = (
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(title)}</title><link rel=icon href='data:,'>",
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>",
        *map(_section, sections),
        f"<script type='application/json' id='mtcli-data'>{_embedded(data)}</script>\n",
        "</body></html>\n",
    )
    with aside(target) as path, path.open("w", encoding="utf-8") as file:
        file.writelines(parts)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose first column names its rows."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _embedded(data: object) -> str:
    """Encodes JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _section(section: PageSection) -> str:
    note = f"<p class=note>{escape(section.note)}</p>" if section.note else ""
    heading = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    return f"<section>{heading}{note}{section.html}</section>"
