"""Defines flags that several commands share, so that a flag means the same everywhere.

A command's signature reads `config: ConfigFile, overrides: Overrides, nproc: Nproc = 1, device:
ComputeDevice = "auto", json_out: JsonOut = None`; `overrides` has its own default, an empty list.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtcli.core.config.nameable import CHECKPOINTS, CONFIGS, HUB, as_hub

if TYPE_CHECKING:
    from mtcli.core.config.errors import Problem


def named(word: str, context: typer.Context | None = None) -> str:
    """Reads owner/name of nothing here as a model of the hub, and says so, once in a context."""
    hub = as_hub(word)
    if hub is None:
        return word
    from mtcli.commands.output import echo
    from mtcli.core.runtime.launch import speaks_first

    said = context.meta.setdefault(HUB, set()) if context else set()
    if word not in said and speaks_first():
        echo(f"note: no file or folder here is {word}: it is taken as {hub}", err=True)
    said.add(word)
    return hub


def taken_from_hub(context: typer.Context, value: Any) -> Any:
    """Reads the words of a parameter as `named` does; the callback of each that takes a model."""
    if isinstance(value, str):
        return named(value, context)
    return value and [named(word, context) for word in value]


_CONFIG = typer.Argument(metavar="CONFIG", help=CONFIGS, callback=taken_from_hub)
ConfigFile = Annotated[str, _CONFIG]
OptionalConfig = Annotated[str | None, _CONFIG]
InitFrom = Annotated[
    str | None,
    typer.Option(
        "--init",
        metavar="CHECKPOINT",
        help="start from these weights (fine-tuning)",
        callback=taken_from_hub,
    ),
]
_CHECKPOINT = typer.Argument(metavar="CHECKPOINT", help=CHECKPOINTS, callback=taken_from_hub)
CheckpointPath = Annotated[str, _CHECKPOINT]
OptionalCheckpoint = Annotated[str | None, _CHECKPOINT]
MovedBase = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="FOLDER",
        callback=taken_from_hub,
        help="the weights that adapters are for, where these are no longer where they were",
    ),
]
Weights = Annotated[
    Literal["fp32", "bf16", "int8"] | None,
    typer.Option("--weights", help="keep weights in these many bits, on a CPU"),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="SECTION.FIELD=VALUE",
        default_factory=list,
        show_default=False,
        help="set a field of the config, any number of times; `mtcli config show` lists the fields",
    ),
]


def _writable_json(target: str | None) -> str | None:
    if target and target != "-":
        from mtcli.core.runtime.outputs import require_writable

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
        help="do not measure this CPU: plan by quick rates of numpy's",
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="leave out and count what cannot be read")
]
# Of `mtcli preprocess` and `mtcli curate`, which read text.
TextKey = Annotated[
    str, typer.Option(help="the key of JSON lines, or the column of a table, with the text")
]
SplitOn = Annotated[
    Literal["blank"] | None,
    typer.Option(help="blank: plain text holds a document per block between blank lines"),
]
Resume = Annotated[bool, typer.Option("--resume", help="go on where an interrupted run stopped")]
Force = Annotated[bool, typer.Option("--force", help="replace outputs that exist")]


def given_flags(context: typer.Context, names: Iterable[str]) -> list[str]:
    """The flags (or the metavar of an argument) on the command line, of the parameters among
    `names`."""
    words = {
        p.name: p.opts[0] if p.opts[0] != p.name else p.metavar for p in context.command.params
    }
    sources = ((words[name], context.get_parameter_source(name)) for name in names)
    return [word or "" for word, source in sources if source and source.name == "COMMANDLINE"]


def config_problems(params: Iterable[Any], given: dict[str, Any]) -> "list[Problem]":
    """The problems of a command line's config, to report together with those of its flags.

    The number of ranks may be a wrong flag, so the config is checked on the fewest ranks that its
    layout needs.
    """
    source = given.get("config")
    if source is None or "overrides" not in {param.name for param in params}:
        return []
    from mtcli.core.checkpoint.fine_tuning import source_of
    from mtcli.core.config.errors import MtcliError
    from mtcli.core.config.loading import read_config
    from mtcli.core.config.rules import problems

    try:
        table = source_of(source, given.get("init"), given.get("base"))
        config, found = read_config(table, given.get("overrides") or ())
    except MtcliError as error:
        return list(error.problems)
    return [*found, *(problems(config, config.parallel.smallest_world) if config else [])]


def refuse_flags(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raises MtcliError for each of the parameters among `names` that is on the command line."""
    from mtcli.core.config.errors import MtcliError, Problem

    if flags := given_flags(context, names):
        raise MtcliError(*(Problem(f"{flag} {why}", f"leave {flag} out", flag) for flag in flags))
