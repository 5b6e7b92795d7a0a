"""The command line that every script here has: `--tiny`, and `--json FILE` for its rows.

`--tiny` is a run of seconds on one core. It shows that a script works and that its contenders
agree; its figures mean nothing. `--json FILE` is how a script hands over what it measured: one JSON
value of objects and lists, which run.py puts into its own file. Where a machine lacks what rows
need, an entry "skipped" has the reason in their place.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Arguments(argparse.ArgumentParser):
    """Parses a script's flags; keywords are the defaults that `--tiny` has for them. A script that
    `needs` packages which are not installed ends, with the reason for its rows."""

    def __init__(self, description: str | None, needs: Sequence[str] = (), **tiny: object) -> None:
        shape = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=shape)
        self._needs, self._tiny = needs, tiny
        self.add_argument("--tiny", action="store_true", help="a run of seconds, to try the script")
        self.add_argument("--json", metavar="FILE", help="write the rows to this file")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        if "--tiny" in words:
            self.set_defaults(**self._tiny)
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        parsed = super().parse_args(words, namespace)
        if missing := lacking({package: package for package in self._needs}):
            write_rows(parsed.json, {"skipped": ", ".join(missing.values())})
            self.exit()
        return parsed


def write_rows(path: str | Path | None, rows: object) -> None:
    """Writes rows as JSON into a file, if one is named; an interrupt leaves the old or the new."""
    if path:
        partial = Path(f"{path}.partial")
        partial.write_text(json.dumps(rows, indent=1) + "\n")
        partial.replace(path)


def lacking(packages: Mapping[str, str]) -> dict[str, str]:
    """The contenders whose package is not installed here, each with that reason; prints them."""
    missing = {
        name: f"{package} is not installed"
        for name, package in packages.items()
        if find_spec(package) is None
    }
    for name, why in missing.items():
        print(f"{name} is left out: {why}")
    return missing


def threads() -> int:
    """The threads of a process that has this machine to itself: OMP_NUM_THREADS, or its cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def data_folder(*names: str) -> Path | None:
    """The folder that MTCLI_TEST_DATA names, where it has all files and folders of these names."""
    folder = Path(os.environ.get("MTCLI_TEST_DATA", "/nonexistent"))
    return folder if all((folder / name).exists() for name in names) else None
