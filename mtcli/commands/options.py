"""Flags that several commands share, so that the same flag means the same everywhere.

A command's signature reads `config: ConfigFile, overrides: Overrides, nproc: Nproc = 1,
device: Device = "auto", json_out: JsonOut = None`; `overrides` brings its own default, an empty
list. With `--json -` stdout holds the JSON and nothing else.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, Literal, ParamSpec

import typer

P = ParamSpec("P")

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


def _writable_json(target: str | None) -> str | None:
    if target and target != "-":
        from mtcli.core.runtime.atomic_writes import require_writable

        require_writable(target, "--json")
    return target


JsonOut = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        callback=_writable_json,
        help="write the results as JSON; - is stdout",
    ),
]
Nproc = Annotated[
    int, typer.Option("--nproc", min=1, max=1024, help="worker processes on this machine")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option("--device", help="where to compute; auto is cuda where there is one"),
]


NoCalibrate = Annotated[
    bool,
    typer.Option(
        "--no-calibrate", help="do not measure this CPU: plan by three quick rates, a roofline"
    ),
]


def write_json(data: object, target: str) -> None:
    """Writes `data` as JSON to a file, or to stdout where target is `-`.

    JSON has no NaN and no infinity, so a number that is not finite becomes null. Raises MtcliError
    (exit 1) where the write fails.
    """
    text = json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    from mtcli.core.runtime.atomic_writes import aside

    with aside(target) as path:
        path.write_text(text, encoding="utf-8")


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def write_answer(data: dict[str, Any], target: str) -> None:
    """As `write_json`, of what a command has done: beside it that nothing is wrong."""
    write_json({"ok": True, "problems": []} | data, target)


@contextmanager
def refusing(json_out: str | None, **others: object) -> Iterator[None]:
    """Writes what is wrong as JSON too, where that was asked for; `others` are further keys.

    Of several ranks the first writes.
    """
    from mtcli.core.config.errors import MtcliError

    try:
        yield
    except MtcliError as error:
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        if json_out and rank == "0":
            write_json(error.as_json() | others, json_out)
        raise


def answering(command: Callable[P, None]) -> Callable[P, None]:
    """A command with --json that answers in JSON too where it fails; see `refusing`."""

    @wraps(command)
    def answered(*arguments: P.args, **options: P.kwargs) -> None:
        target = options.get("json_out")
        with refusing(target if isinstance(target, str) else None):
            command(*arguments, **options)

    return answered


def require_model(checkpoint: str, overrides: list[str], world: int) -> None:
    """Raises MtcliError, before torch is imported, where a path holds no checkpoint, or one whose
    model `world` ranks cannot open with these overrides."""
    from pathlib import Path

    from mtcli.core.checkpoint.folder import find_checkpoint, model_of
    from mtcli.core.config.forward import forward_config, require_causal

    model = model_of(find_checkpoint(Path(checkpoint)))
    if model is not None:
        require_causal(checkpoint, model)
        forward_config(model, overrides, world)
