"""Draws the report as one self-contained page: tables, and pictures in SVG, without scripts."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mtcli.core.config.counts import counted
from mtcli.core.curate.report import why

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
h1,h2{font-weight:600}h2{margin-top:2.5rem}table{border-collapse:collapse;width:100%}
td,th{padding:.25rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid #e4e4e4}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td{overflow-wrap:anywhere}details{margin:.4rem 0}summary{cursor:pointer}
svg{max-width:100%;height:auto}code{font-size:.9em}
"""
BLUE, ORANGE, GREY = "#2f6fb0", "#e08a2e", "#6b6b6b"
WIDTH, BAR, LEFT, RIGHT = 900, 24, 130, 200  # of pictures, in pixels
HEIGHT = 180
CLUSTERS_SHOWN = 50
DOCUMENTS_SHOWN = 50


def report_html(report: Mapping[str, Any]) -> str:
    """Draws the report of `build_report` as a page."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>mtcli curate</title>",
        f"<style>{STYLE}</style><h1>Curated corpus</h1>",
        _summary(report),
        "<h2>Documents after each stage</h2>",
        _funnel(report["stages"]),
        _stages(report["stages"]),
        "<h2>Sizes of documents</h2>",
        _sizes(report["histograms"]["bytes_log2"]),
        *(_clusters(stage, clusters) for stage, clusters in report["clusters"].items()),
        _contamination(report["contamination"]),
        _sources(report),
        "<h2>What was left out, and why</h2>",
        *map(_samples, report["stages"]),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _summary(report: Mapping[str, Any]) -> str:
    files, bad = report["inputs"]["files"], report["bad_lines"]
    size = sum(file["bytes"] for file in files)
    output = (
        f"{counted(report['documents'], 'document')} in {counted(len(report['shards']), 'shard')}"
    )
    lines = [f"<p>{counted(len(files), 'file')} of {size / 1e6:,.1f} MB became {output}.</p>"]
    if bad["count"]:
        lines.append(f"<p>{bad['count']:,} records could not be read:</p>")
        lines.append(_table(("record",), [[line] for line in bad["examples"]]))
    return "\n".join(lines)


def _stages(stages: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            stage["stage"],
            f"{stage['documents_in']:,}",
            f"{stage['documents_out']:,}",
            f"{_share(stage):.2%}",
            f"{stage['bytes_in'] / 1e6:,.2f}",
            f"{stage['bytes_out'] / 1e6:,.2f}",
            why(dict(stage)),
        ]
        for stage in stages
    ]
    names = ("stage", "documents in", "out", "dropped", "MB in", "MB out", "why")
    return _table(names, rows, numbers=range(1, 6))


def _share(stage: Mapping[str, Any]) -> float:
    """The share of a stage's documents that it dropped."""
    return stage["documents_dropped"] / stage["documents_in"] if stage["documents_in"] else 0.0


def _funnel(stages: Sequence[Mapping[str, Any]]) -> str:
    """Draws a bar per stage: documents out, in front of documents in."""
    most = max((stage["documents_in"] for stage in stages), default=0) or 1
    room = WIDTH - LEFT - RIGHT
    parts = []
    for row, stage in enumerate(stages):
        top = row * (BAR + 10)
        documents_in, documents_out = (stage[f"documents_{side}"] for side in ("in", "out"))
        parts += [
            _text(LEFT - 10, top + 17, stage["stage"], "end"),
            _bar(LEFT, top, documents_in * room / most, BAR, "#d9e3ee"),
            _bar(LEFT, top, documents_out * room / most, BAR, BLUE),
            _text(
                LEFT + documents_in * room / most + 8,
                top + 17,
                f"{documents_out:,} of {documents_in:,}",
            ),
        ]
    return _svg(len(stages) * (BAR + 10), parts, "Documents after each stage")


def _sizes(bins: Sequence[Sequence[int]]) -> str:
    """Draws documents by size, as read and after the per-document stages."""
    if not bins or not any(map(any, bins)):
        return ""
    read, after = bins
    used = [index for index, count in enumerate(read) if count or after[index]]
    low, high = used[0], used[-1] + 1
    names = [_size_name(index) for index in range(low, high)]
    values = [(read[index], after[index]) for index in range(low, high)]
    return _columns(names, values, ("read", "after the per-document stages"))


def _size_name(index: int) -> str:
    size = 1 << index
    return f"<{size >> 10} KiB" if size >= 1024 else f"<{size} B"


def _columns(
    names: Sequence[str], values: Sequence[Sequence[int]], legend: Sequence[str] = ()
) -> str:
    """Draws columns of one or two values by name."""
    most = max((max(group) for group in values), default=0) or 1
    step = min(90.0, (WIDTH - 20) / max(1, len(names)))
    parts = []
    for index, (name, group) in enumerate(zip(names, values, strict=True)):
        left, width = 10 + index * step, (step - 8) / len(group)
        for position, (value, colour) in enumerate(zip(group, (BLUE, ORANGE), strict=False)):
            tall = value * (HEIGHT - 20) / most
            parts.append(_bar(left + position * width, HEIGHT - tall, width - 1, tall, colour))
        parts.append(_text(left + (step - 8) / 2, HEIGHT + 16, name, "middle", 11))
        label = f"{max(group):,}" if max(group) else ""
        top = HEIGHT - max(group) * (HEIGHT - 20) / most - 4
        parts.append(_text(left + (step - 8) / 2, top, label, "middle", 11))
    for position, (name, colour) in enumerate(zip(legend, (BLUE, ORANGE), strict=False)):
        parts.append(_bar(10 + position * 120, HEIGHT + 28, 12, 12, colour))
        parts.append(_text(28 + position * 120, HEIGHT + 39, name))
    return _svg(HEIGHT + (48 if legend else 24), parts, " and ".join(legend) or "counts")


def _clusters(stage: str, clusters: Mapping[str, Any]) -> str:
    if not clusters["count"]:
        return ""
    sizes = sorted((int(size), count) for size, count in clusters["sizes"].items())
    names = [str(size) for size, _ in sizes[:20]]
    parts = [
        f"<h2>Duplicates: {escape(stage)}</h2>"
        f"<p>{counted(clusters['count'], 'cluster')}, by documents:</p>",
        _columns(names, [(count,) for _, count in sizes[:20]]),
    ]
    if stage == "fuzzy":
        parts += [
            f"<p>One cluster has {large['clustered']:,} of {large['documents']:,} documents of "
            f"<code>{escape(large['source'])}</code>.</p>"
            for large in clusters["large"]
        ]
        shares = clusters["jaccard"]
        first = next((index for index, count in enumerate(shares) if count), 0)
        names = [f"{index / 20:.2f}" for index in range(first, 20)]
        parts.append("<p>Jaccard similarity of the removed with the one that stays, from:</p>")
        parts.append(_columns(names, [(count,) for count in shares[first:]]))
    rows = [
        [
            str(cluster["kept_id"]),
            ", ".join(f"{copy['id']} ({copy['jaccard']:.3f})" for copy in cluster["removed"][:20]),
        ]
        for cluster in clusters["shown"][:CLUSTERS_SHOWN]
    ]
    table = _table(("kept", "removed, with their Jaccard"), rows)
    return "\n".join([*parts, f"<details><summary>clusters</summary>{table}</details>"])


def _contamination(tasks: Mapping[str, Any]) -> str:
    if not tasks:
        return ""
    parts = ["<h2>Evaluation tasks found in the corpus</h2>"]
    for task, hits in tasks.items():
        rows = [
            [
                str(document["id"]),
                "dropped" if document["dropped"] else f"{document['cuts']} cuts",
                "; ".join(document["ngrams"][:5]),
            ]
            for document in hits["shown"][:DOCUMENTS_SHOWN]
        ]
        counts = f"{len(hits['ngrams']):,} n-grams, {hits['documents']:,} documents cut"
        parts.append(f"<p><code>{escape(task)}</code>: {counts}</p>")
        parts.append(_table(("document", "what was done", "n-grams"), rows))
        if common := hits["common"]:
            rows = [[one["item"], "; ".join(one["ngrams"][:5])] for one in common[:DOCUMENTS_SHOWN]]
            parts.append(f"<p>Kept as common phrases, of {len(common):,} items:</p>")
            parts.append(_table(("item", "n-grams"), rows))
    return "\n".join(parts)


def _sources(report: Mapping[str, Any]) -> str:
    blend = report["blend"].get("sources", {}) if report["blend"] else {}
    rows = []
    for name, counts in report["sources"].items():
        row = [name, f"{counts['documents']:,}", f"{counts['bytes'] / 1e6:,.2f}"]
        facts = blend.get(name)
        row += [f"{facts['weight']:.5f}", f"{facts['epochs']:.2f}"] if facts else ["", ""]
        rows.append(row)
    names = ("source", "documents left", "MB", "weight in the blend", "epochs")
    return "<h2>Sources</h2>" + _table(names, rows, numbers=range(1, 5))


def _samples(stage: Mapping[str, Any]) -> str:
    parts = []
    for reason, samples in stage["samples"].items():
        rows = []
        for sample in samples:
            more = {k: v for k, v in sample.items() if k not in ("id", "source", "text") and v}
            details = ", ".join(f"{key} {value}" for key, value in more.items())
            rows.append([str(sample["id"]), sample["source"], sample["text"], details])
        count = stage["reasons"].get(reason, len(rows))
        head = f"{escape(stage['stage'])}: {escape(reason)}, {count:,}"
        table = _table(("id", "source", "begins with", ""), rows)
        parts.append(f"<details><summary>{head}</summary>{table}</details>")
    return "\n".join(parts)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{' class=n' if column in numbers else ''}>{escape(cell)}</{kind}>"
            for column, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', names)}</tr>\n{body}</table>"


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    shape = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return f'<svg role="img" {shape}><title>{escape(title)}</title>{"".join(parts)}</svg>'


def _bar(left: float, top: float, width: float, height: float, colour: str) -> str:
    shape = f'x="{left:.1f}" y="{top:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect {shape} fill="{colour}"/>'


def _text(left: float, top: float, text: str, anchor: str = "start", size: int = 13) -> str:
    attributes = f'x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {attributes} fill="{GREY}">{escape(text)}</text>'
