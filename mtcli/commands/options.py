"""Flags that several commands share, so that the same flag means the same everywhere.

A command's signature reads `config: ConfigFile, overrides: Overrides, nproc: Nproc = 1,
device: Device = "auto", json_out: JsonOut = None`; `overrides` brings its own default, an empty
list. With `--json -` stdout holds the JSON and nothing else.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mtcli.core.spec.errors import failed, wrong

ConfigFile = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="a TOML file, a run folder, or the name of a preset"),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="SECTION.FIELD=VALUE",
        default_factory=list,
        show_default=False,
        help="set a field of the config; may be given any number of times",
    ),
]
JsonOut = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="write the results as JSON; - is stdout"),
]
Nproc = Annotated[int, typer.Option("--nproc", min=1, help="worker processes on this machine")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option("--device", help="where to compute; auto is cuda where there is one"),
]


def write_json(data: object, target: str) -> None:
    """Writes `data` as JSON to a file, or to stdout where target is `-`.

    JSON has no NaN and no infinity, so a number that is not finite becomes null. A file is written
    aside, synced and renamed, so it is never half there.

    Raises MtcliError where the folder does not exist (exit 2) or the write fails (exit 1).
    """
    text = json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(target)
    if not path.parent.is_dir():
        raise wrong(f"there is no folder {str(path.parent)!r}", "create it first", "--json")
    if path.is_dir():
        raise wrong(f"{target} is a folder", "name a file, or - for stdout", "--json")
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise failed(f"{target} cannot be written: {error.strerror}", "name another file") from None


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
