"""Runs every benchmark of this folder in turn, each in a process of its own, into one JSON file.

    python benchmarks/run.py                     # as `make bench`: all, into benchmarks/results
    python benchmarks/run.py startup eval --json FILE
    python benchmarks/run.py --resume            # those that the file does not have yet, or failed
    python benchmarks/run.py --tiny              # all, in minutes; the figures mean nothing

Rows are shown as they are measured, with a bar on stderr. The file has the date, the commit, the
machine and versions, and each script's arguments, seconds, exit status and rows: what its `--json`
wrote. It is written after every script. A script that fails stops no other; the end names those
that failed, and exits with 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from arguments import Arguments, write_rows
from machine import commit, machine, versions

HERE = Path(__file__).parent
SAME = ("tiny", "machine", "versions")  # facts of a file that is continued


def main() -> None:
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}
    args = parse()
    if unknown := [name for name in args.names if name not in scripts]:
        sys.exit(f"error: no benchmark {', '.join(unknown)}\n\nhint: {', '.join(scripts)}")
    path, found = opened(args)
    names = args.names or list(scripts)
    for number, name in enumerate(names, 1):
        print(f"\n== {name} ({number} of {len(names)})", flush=True)
        if found["scripts"].get(name, {}).get("status") == 0:
            print(f"kept, from {path}", flush=True)
            continue
        found["scripts"][name] = run(scripts[name], ["--tiny"] if args.tiny else [])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, found)
    print(f"\nwrote {path}")
    if failed := [name for name in names if found["scripts"][name]["status"]]:
        sys.exit(f"error: these benchmarks failed: {', '.join(failed)}")


def parse() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("names", nargs="*", help="some of them [all]")
    parser.add_argument("--resume", action="store_true", help="go on with a file")
    return parser.parse_args()


def opened(args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The file, and what it holds: the facts of this machine, and what finished in it before."""
    facts = {"what": "bench", "date": str(date.today()), "commit": commit(), "tiny": args.tiny}
    facts |= {"machine": machine(), "versions": versions(), "scripts": {}}
    cpu = "-".join(facts["machine"]["cpu"].replace("(R)", "").split())
    folder = Path(tempfile.gettempdir()) if args.tiny else HERE / "results"
    default = folder / f"bench-{'tiny-' * args.tiny}{facts['date']}-{cpu}.json"
    path = Path(args.json or default)
    if path.exists() and not args.resume and not args.tiny:
        sys.exit(f"error: {path} is there\n\nhint: --resume goes on with it, --json names another")
    if not (path.exists() and args.resume):
        return path, facts
    kept = json.loads(path.read_text())
    if other := [name for name in SAME if kept[name] != facts[name]]:
        sys.exit(f"error: {path} has another {' and '.join(other)}\n\nhint: --json names another")
    return path, kept


def run(script: Path, flags: list[str]) -> dict[str, Any]:
    """Runs a script; returns what the file has of it."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        start = perf_counter()
        env = os.environ | ({"OMP_NUM_THREADS": "1"} if "--tiny" in flags else {})
        # -u: a row is shown when it is measured, in a pipe too
        done = subprocess.run([sys.executable, "-u", script, *flags, "--json", rows], env=env)
        entry = {"arguments": flags, "seconds": round(perf_counter() - start, 1)}
        measured = json.loads(rows.read_text()) if rows.exists() else None
    return entry | {"status": done.returncode, "rows": measured}


if __name__ == "__main__":
    main()
