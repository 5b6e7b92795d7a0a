"""Writes the tables of docs/reference/performance.md from the files of benchmarks/results.

python scripts/performance_docs.py          # after `make bench` or `make bench-gpu` wrote a file

Figures are copied from there, never typed. Of a machine or device the newest file counts.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = (
    "<!-- {kind}: written by scripts/performance_docs.py -->\n",
    "<!-- end of {kind} -->\n",
)
# Of each kind of file: what the page says without one.
NONE = {
    "bench": "No file of `make bench` is committed yet: the tables below were copied by hand.\n",
    "step": "No file of a training step is committed yet.\n",
    "step counts": "No file of trace_step.py is committed yet.\n",
    "kernels": "No file of kernels is committed yet.\n",
}
HEAD = ["what", "script", "mtcli", "peers", "ratio"]
Row = list[str]


def main() -> None:
    """Rewrites the page."""
    PAGE.write_text(with_tables(PAGE.read_text()))


def with_tables(text: str, results: Path = RESULTS) -> str:
    """The page with its tables written anew."""
    for kind, none in NONE.items():
        begin, end = BEGIN.format(kind=kind), END.format(kind=kind)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        files = (json.loads(path.read_text()) for path in newest(kind, results))
        sections = [section(kind, found).rstrip() + "\n" for found in files]
        text = "\n".join([before + begin, *(sections or [none]), end + after])
    return text


def newest(kind: str, results: Path) -> list[Path]:
    """The last file of each machine or device."""
    last: dict[str, Path] = {}
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and found.get("what") == kind and not found.get("tiny"):
            last[str(found.get("device") or found.get("machine"))] = path
    return list(last.values())


def section(kind: str, found: dict[str, Any]) -> str:
    """A line of facts, and the tables of a file."""
    if kind == "bench":
        return bench(found)
    sys.path.append(str(ROOT / "benchmarks" / "gpu"))
    from table import page

    return str(page(found))


def bench(found: dict[str, Any]) -> str:
    """The section of a file of `make bench`: a row for each figure with peers."""
    machine, done = found["machine"], found["scripts"]
    about = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
    names = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    lines = [f"{about}, {found['date']}, commit {found['commit']}. {names}.", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD))]
    for name, entry in done.items():
        command = " ".join([f"bench_{name}.py", *entry["arguments"]])
        for what, *cells in rows_of(name, entry):
            lines.append(f"| {' | '.join([what, f'`{command}`', *cells])} |")
    if failed := [name for name, entry in done.items() if entry["status"]]:
        lines += ["", f"Failed: {', '.join(failed)}."]
    return "\n".join(lines) + "\n"


def rows_of(name: str, entry: dict[str, Any]) -> Iterator[Row]:
    """The rows of a script's entry, without contenders that were skipped."""
    rows = entry["rows"]
    if name in TABLES and entry["status"] == 0 and "skipped" not in rows:
        left_out = [who for who, row in rows.items() if isinstance(row, dict) and "skipped" in row]
        yield from TABLES[name]({who: row for who, row in rows.items() if who not in left_out})


def against(ours: float, peers: dict[str, float], unit: str) -> Row:
    """The cells of a rate: mtcli's, its peers', and mtcli's over each."""
    named = ", ".join(f"{name} {_short(rate)}" for name, rate in peers.items())
    return [f"{_short(ours)} {unit}", named, ", ".join(_short(ours / r) for r in peers.values())]


def preprocess(rows: dict[str, Any]) -> Iterator[Row]:
    for clock, what in {"command": "whole command", "work": "without start-up"}.items():
        rates = {name: row[clock]["best"] for name, row in rows.items()}
        yield [f"preprocess, {what}", *against(rates.pop("mtcli"), rates, "MB/s")]


def samples(rows: dict[str, Any]) -> Iterator[Row]:
    rates = {name: row["best"] for name, row in rows.items()}
    yield ["sample fetch, one thread", *against(rates.pop("mtcli"), rates, "Mtok/s")]


def train(rows: dict[str, Any]) -> Iterator[Row]:
    rates = {name: 1 / min(row["seconds"]) for name, row in rows.items()}
    yield ["training step", *against(rates.pop("ours"), rates, "steps/s")]


def evaluation(found: dict[str, Any]) -> Iterator[Row]:
    rates = {name: run["items_per_second"] for name, run in found["runs"].items()}
    what = f"evaluation, {found['size']}, {found['dtype']}, {found['items']} items"
    yield [what, *against(rates.pop("mtcli"), rates, "items/s")]


def startup(rows: dict[str, list[float]]) -> Iterator[Row]:
    least = {name: min(milliseconds) for name, milliseconds in rows.items()}
    peers = ", ".join(f"{name} {_short(ms)}" for name, ms in least.items() if "mtcli" not in name)
    for name, ms in least.items():
        if "mtcli" in name:
            yield [f"`{name}`" if "to its" not in name else name, f"{ms:,.0f} ms", peers, ""]


def timers(row: dict[str, float]) -> Iterator[Row]:
    named = f"of which {row['accounted_for']:.1%} has a name"
    yield ["timers of `profile`", f"{row['cost']:.1%} of a step, {named}", "", ""]


def parallel(rows: dict[str, Any]) -> Iterator[Row]:
    for layout, row in rows.items():
        cells = against(row["two"], {"one process": row["one"]}, "tok/s")
        yield [f"two ranks, {layout}", *cells]


def checkpoint(rows: dict[str, Any]) -> Iterator[Row]:
    for what in ("save", "load cold", "reshard"):
        rates = {name: 1 / min(seconds) for name, seconds in rows[what].items()}
        yield [f"checkpoint, {what}", *against(rates.pop("mtcli"), rates, "a second")]


TABLES: dict[str, Callable[[Any], Iterator[Row]]] = {
    "preprocess": preprocess,
    "samples": samples,
    "train": train,
    "eval": evaluation,
    "startup": startup,
    "profile": timers,
    "parallel": parallel,
    "checkpoint": checkpoint,
}


def _short(number: float) -> str:
    """Three digits, or whole thousands."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


if __name__ == "__main__":
    main()
