"""Finds the runs under a folder, trials of sweeps among them. Imports no torch."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from mtcli.core.config.errors import wrong
from mtcli.core.config.nameable import near_path
from mtcli.core.training.run_folder import holds_run

MOST_DEPTH = 4  # folders between the one that is given and a run's


def find_runs(folder: Path) -> list[Path]:
    """Lists the run folders at and under a folder, by name. Follows no link below it.

    Raises MtcliError where there is no such folder.
    """
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        hint = f"give the folder of runs, or a run{near_path(str(folder), is_folder=True)}"
        raise wrong(what, hint)
    return list(_runs(folder, MOST_DEPTH))


def find_all_runs(names: Iterable[str]) -> list[Path]:
    """Lists the run folders at and under some folders, each once, in their order.

    Raises MtcliError where any holds no run.
    """
    found: dict[Path, None] = {}
    for name in names:
        runs = find_runs(Path(name))
        if not runs:
            raise wrong(f"{name} holds no run", "`mtcli runs` lists the runs that there are")
        found |= dict.fromkeys(runs)
    return list(found)


def require_one_run(name: str) -> Path:
    """Returns the folder of a run. Raises MtcliError where it holds none, or several."""
    runs = find_all_runs([name])
    if len(runs) > 1:
        hint = f"such as {runs[0]}"
        raise wrong(f"{name} holds {len(runs)} runs, and one is taken", hint)
    return runs[0]


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    with suppress(OSError):  # a folder that this user may not read
        if holds_run(folder):
            yield folder
        elif depth:
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False) and entry.name[0] != ".":
                    yield from _runs(folder / entry.name, depth - 1)
