"""The Typer app. A command's module is imported only when that command runs, so help is instant.

`COMMANDS` is the whole command line: what each command is for, and where its function lives. The
command's own options are the parameters of that function.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from mtcli.core.spec.errors import MtcliError, Problem, wrong

if TYPE_CHECKING:  # typer keeps its copy of click under a private name
    from typer._click import HelpFormatter


class Command(NamedTuple):
    """Where a subcommand lives (`module:function`) and how its docstring begins."""

    target: str
    help: str


COMMANDS: dict[str, Command] = {
    name: Command(f"mtcli.commands.{name}:{name}", purpose)
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

TEXTS = ("--prompt", "--text-key")  # flags whose values name nothing outside of the command line


class NamingCommand(TyperCommand):
    """A command that refuses words which could name no file, before any is taken for a path."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Click's parsing. Raises MtcliError with every word that is empty or has a NUL byte."""
        from mtcli.core.spec.foreign import names_a_file, shown  # help needs none of it

        problems = [
            Problem(
                f"{shown(word)} names nothing", f"`{ctx.command_path} --help` shows its usage", flag
            )
            for flag, word in _given(args)
            if flag not in TEXTS and not names_a_file(word)
        ]
        if problems:
            raise MtcliError(*problems)
        return super().parse_args(ctx, args)


def _given(args: list[str]) -> Iterator[tuple[str, str]]:
    """The words that are no flags, each with the flag that it follows or is joined to, if any."""
    flag = ""
    for word in args:
        name, equals, value = word.partition("=")
        if not name.startswith("-") or name == "-":
            yield flag, word
            flag = ""
        elif equals:
            yield name, value
            flag = ""
        else:
            flag = name


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
            from mtcli.core.spec.load import closest  # here, not above: it imports pydantic

            hint = "`mtcli --help` lists the commands" + closest(cmd_name, COMMANDS)
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
    single.command(name, cls=NamingCommand)(getattr(import_module(module), function))
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
