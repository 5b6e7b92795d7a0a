"""Defines flags that several commands share, so that the same flag means the same everywhere.

A command's signature reads `config: ConfigFile, overrides: Overrides, nproc: Nproc = 1,
device: ComputeDevice = "auto", json_out: JsonOut = None`; `overrides` brings its own default, an
empty list.
"""

from typing import Annotated, Literal

import typer

ConfigFile = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="a TOML file, a run folder, or the name of a preset"),
]
TrainingConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="a TOML file, a run folder, a preset's name, or a Hugging Face folder",
    ),
]
InitFrom = Annotated[
    str | None,
    typer.Option("--init", metavar="CHECKPOINT", help="start from these weights (fine-tuning)"),
]
CheckpointPath = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT", help="a checkpoint, a run folder or a Hugging Face folder"
    ),
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
ComputeDevice = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option("--device", help="where to compute; auto is cuda where there is one"),
]
NoCalibrate = Annotated[
    bool,
    typer.Option(
        "--no-calibrate",
        help="do not measure this CPU: plan by a roofline of three quickly measured rates",
    ),
]
