"""The Typer app. A command's module is imported only when that command runs, so help is instant.

`COMMANDS` is the whole command line: what each command is for, and where its function lives. The
command's own options are the parameters of that function.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from mtcli.core.spec.errors import wrong
from mtcli.usage import Command

if TYPE_CHECKING:  # typer keeps its copy of click under a private name
    from typer._click import HelpFormatter


class Target(NamedTuple):
    """Where a subcommand lives (`module:function`) and how its docstring begins."""

    target: str
    help: str


COMMANDS: dict[str, Target] = {
    name: Target(f"mtcli.commands.{name}:{name}", purpose)
    for name, purpose in (
        ("preprocess", "Turn text into token files"),
        ("plan", "Check a run config; predict its memory, step time and bubble"),
        ("train", "Train or fine-tune a model from a config"),
        ("eval", "Evaluate a checkpoint on WikiText-103, LAMBADA, RACE"),
        ("generate", "Sample text from a checkpoint"),
        ("profile", "Run a few steps of a config with timers"),
        ("shard", "Convert and reshard checkpoints"),
    )
}
# What other tools call a command.
MEANT = {
    **dict.fromkeys(("finetune", "fine-tune", "pretrain", "sft", "fit", "resume"), "train"),
    **dict.fromkeys(("tokenize", "prepare", "tokenise"), "preprocess"),
    **dict.fromkeys(("evaluate", "test", "validate", "lm_eval", "score"), "eval"),
    **dict.fromkeys(("sample", "infer", "inference", "chat", "predict"), "generate"),
    **dict.fromkeys(("convert", "export", "reshard", "merge", "upcycle", "inspect"), "shard"),
    **dict.fromkeys(("search", "estimate", "presets", "config", "check"), "plan"),
    **dict.fromkeys(("bench", "benchmark", "trace", "measure"), "profile"),
}


class LazyGroup(TyperGroup):
    """The group of `COMMANDS`: names and help come from the table, options from the module."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """The names, in the order a run meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand:
        """The command of that name, imported now.

        Raises MtcliError with the closest name where there is none (exit 2).
        """
        if cmd_name not in COMMANDS:
            from mtcli.core.spec.synonyms import closest  # here, not above: --help needs none

            near = f"; did you mean {MEANT[cmd_name]!r}?" if cmd_name in MEANT else ""
            hint = "`mtcli --help` lists the commands" + (near or closest(cmd_name, COMMANDS))
            raise wrong(f"there is no command {cmd_name!r}", hint)
        return load(cmd_name)

    def format_commands(self, ctx: typer.Context, formatter: "HelpFormatter") -> None:
        """Writes the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


def load(name: str) -> TyperCommand:
    """The Typer command of a registered name, with its options; imports its module."""
    module, _, function = COMMANDS[name].target.partition(":")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=Command)(getattr(import_module(module), function))
    return get_command(single)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"mtcli {version('mtcli')}")
        raise typer.Exit


app = typer.Typer(
    name="mtcli",
    cls=LazyGroup,
    rich_markup_mode=None,  # plain help: importing rich would take half of --help's 120 ms
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(epilog="Every command has --help. Exit codes: 0 done, 1 failed, 2 wrong input.")
def mtcli(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take text to a trained, evaluated and profiled large transformer."""
