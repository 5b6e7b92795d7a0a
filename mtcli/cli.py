"""Defines the Typer app. A command's module is imported only when that command runs, so help is
instant.

`COMMANDS` lists each command's purpose and function, whose parameters are its options. A wrong
command line is refused as wrong configs are: with all problems at once, and in JSON too.
"""

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from shlex import quote, split
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from mtcli.core.config.errors import MtcliError, Problem, wrong

if TYPE_CHECKING:  # typer keeps its copy of click under a private name
    from typer._click import HelpFormatter

# What stands for a flag elsewhere: of other commands, and of the tools that users come from.
FLAGS = {"--gpus": "--nproc", "--nproc-per-node": "--nproc", "--nproc": "--gpus", "--np": "--nproc"}
FLAGS |= {"-o": "--output", "--batch": "--global-batch", "--batch-size": "--global-batch"}
# What other tools have a flag for, and here is a command's argument.
ARGUMENTS = ("--config", "--model", "--checkpoint")
# Flags that name a file to write, where their metavar says so; and endings of a dataset's files.
WRITES = ("--json", "--items", "--output", "--trace", "--report", "--plot", "--sbatch", "--jobset")
ENDINGS = (".bin", ".idx", ".json")
TEXTS = ("--prompt", "--text-key")  # flags whose values name nothing outside of the command line


# What help calls a value of a type, where the option has no word of its own.
METAVARS = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT"}


class Command(TyperCommand):
    """A subcommand that reports every problem of its arguments before it runs.

    Raises MtcliError (exit 2), which is also written to --json where that is given.
    """

    def __init__(self, *words: Any, **settings: Any) -> None:
        super().__init__(*words, **settings)
        for param in self.params:
            if isinstance(param, TyperOption) and param.metavar is None:
                param.metavar = METAVARS.get(param.type_descriptor.annotation)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parses the arguments; returns the leftover ones, an empty list."""
        words, problems = list(args), list(_nameless(ctx, args))
        reported = {problem.field for problem in problems}
        while True:
            try:
                given, leftover, order = self.make_parser(ctx).parse_args(args=list(words))
                break
            except typer.TyperException as error:
                words = _without_option(words, error)
                problems.append(_wrong_option(ctx, error))
        misread = bool(problems)  # what stands beside an unknown option may be its value
        problems += [*_repeated(order), *_overwritten(self.get_params(ctx), given)]
        for param in sorted(self.get_params(ctx), key=lambda param: not param.is_eager):
            if reported & set(param.opts):
                continue
            try:
                param.handle_parse_result(ctx, given, leftover)
            except MtcliError as error:
                problems += error.problems
            except typer.TyperException as error:
                if not misread or isinstance(param, TyperOption):
                    problems.append(_wrong_value(ctx, param, given.get(param.name), error))
        if leftover and not misread:
            problems.append(_extra_argument(ctx, leftover[0]))
        if not problems:
            return super().parse_args(ctx, args)
        from mtcli.commands.options import config_problems
        from mtcli.commands.output import refusing

        problems += [] if misread else config_problems(self.get_params(ctx), given)
        target = given.get("json_out")
        broken = any(problem.field == "--json" for problem in problems)
        with refusing(target if isinstance(target, str) and not broken else None):
            raise MtcliError(*problems)


def _nameless(ctx: typer.Context, args: list[str]) -> Iterator[Problem]:
    """Yields problems of words that are empty or have a NUL byte, and so can name no file; an empty
    one would stand for the current folder."""
    # Here, not above: --help needs none.
    from mtcli.core.config.untrusted import names_a_file, shown

    flag = ""
    for word in args:
        name, equals, value = word.partition("=")
        is_flag = name.startswith("-") and name != "-"
        flag, value = (name, value) if is_flag else (flag, word)
        if (equals or not is_flag) and flag not in TEXTS and not names_a_file(value):
            yield Problem(f"{shown(value)} names nothing", _usage(ctx), flag)
        flag = name if is_flag and not equals else ""


def _repeated(order: Sequence[Any]) -> Iterator[Problem]:
    """Yields problems of single-valued options that are given several times."""
    for param in dict.fromkeys(order):
        if isinstance(param, TyperOption) and not param.multiple and order.count(param) > 1:
            name = param.opts[0]
            yield Problem(f"it is given {order.count(param)} times", "give it once", name)


def _overwritten(params: Sequence[Any], given: dict[str, Any]) -> Iterator[Problem]:
    """Yields problems of output files that are named again on the command line: as an input, a file
    of a dataset's prefix, or another output."""
    of_files = {
        param: os.path.realpath(given[param.name])
        for param in params
        if param.opts[0] in WRITES and str(param.metavar).startswith("FILE")
        if list(_words(given.get(param.name)))
    }
    other_values = (given.get(param.name) for param in params if param not in of_files)
    words = [word for value in other_values for word in _words(value)] if of_files else []
    prefixes = (word for word in words if os.path.exists(f"{word}.idx"))
    names = {os.path.realpath(word) for word in words}
    names |= {os.path.realpath(word + ending) for word in prefixes for ending in ENDINGS}
    for param, path in of_files.items():
        twice = [other.opts[0] for other in of_files if other != param and of_files[other] == path]
        if (path in names and os.path.isfile(path)) or twice:
            what = f"{path} is of {twice[0]} too" if twice else f"{path} is an input"
            yield Problem(what, "name another file", param.opts[0])


def _words(value: Any) -> Iterator[str]:
    """Yields the texts of a parameter's value that may name files, and the two sides of a = in
    each."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, str) and "\0" not in one:
            yield from (one, *one.split("=", 1))


def _usage(ctx: typer.Context) -> str:
    return f"`{ctx.command_path} --help` shows its usage"


def _example(ctx: typer.Context, name: str) -> str:
    """Shows a flag with its value in the command's example, or the whole of that for another name;
    without the flag there, what stands for its value in the help."""
    example = COMMANDS[ctx.info_name or ""].example
    if not name.startswith("-"):
        return f"such as `{example}`"
    words = split(example)
    if name in words:
        return f"such as {name} {quote(words[words.index(name) + 1])}"
    (param,) = (param for param in ctx.command.get_params(ctx) if name in param.opts)
    return f"{name} {param.metavar}" if param.metavar else _usage(ctx)


def _extra_argument(ctx: typer.Context, word: str) -> Problem:
    """Builds the problem of an argument too many: a prompt, or a dataset, without its flag."""
    flags = {flag for param in ctx.command.get_params(ctx) for flag in param.opts}
    hint = f"--prompt {quote(word)}" if "--prompt" in flags else _usage(ctx)
    if "--set" in flags and os.path.isfile(f"{word}.idx"):
        hint = f"--set data.train={quote(word)}"
    return Problem(f"got unexpected extra argument {word!r}", hint)


def _wrong_option(ctx: typer.Context, error: typer.TyperException) -> Problem:
    """Builds the problem of an unknown option, or of one without its value."""
    message, name = error.format_message().rstrip("."), error.option_name
    options = [flag for param in ctx.command.get_params(ctx) for flag in param.opts]
    if name in options:
        return Problem(message[0].lower() + message[1:], _example(ctx, name), name)
    arguments = [p.metavar for p in ctx.command.get_params(ctx) if not isinstance(p, TyperOption)]
    if name in ARGUMENTS and arguments[:1] in (["CONFIG"], ["CHECKPOINT"]):
        hint = f"{arguments[0]} has no flag: {ctx.command_path} {arguments[0]}"
        return Problem("there is no such option", hint, name)
    meant = _meant_option(name, options)
    hint = f"did you mean {' or '.join(meant)}?" if meant else _usage(ctx)
    return Problem("there is no such option", hint, name)


def _meant_option(name: str, options: list[str]) -> list[str]:
    """Guesses what an unknown option stands for: another one, or a field of the config."""
    from mtcli.core.config.loading import all_fields, value_named
    from mtcli.core.config.synonyms import fields_named, meant_fields, nearest

    has_fields = "--set" in options and "--config" not in options  # curate's are others
    word, fields = name.lstrip("-"), all_fields() if has_fields else ()
    if (other := FLAGS.get(name)) in options:
        return [other]
    if has_fields and (value := value_named(word)):
        return [f"--set {value}"]
    exact = fields_named(word.rpartition(".")[2], fields)
    near = nearest(word, (option.lstrip("-") for option in options if len(option) > 2))
    if near and not exact:
        return [f"--{near}"]
    return [f"--set {field}=VALUE" for field in exact or meant_fields(word, (), fields)]


def _without_option(words: list[str], error: typer.TyperException) -> list[str]:
    """Removes the option that an error is about. Raises the error where there is none."""
    name = getattr(error, "option_name", None)
    for index, word in enumerate(words):
        if name is None:
            break
        # In a cluster of short options, such as -xn, it is one of the letters.
        in_cluster = len(name) == 2 and word[:1] == "-" != word[1:2] and name[1] in word
        if word.partition("=")[0] == name or in_cluster:
            return words[:index] + words[index + 1 :]
    raise error


def _wrong_value(
    ctx: typer.Context, param: Any, value: Any, error: typer.TyperException
) -> Problem:
    """Builds the problem of a parameter's value, worded as for config fields."""
    is_option = isinstance(param, TyperOption)
    name = param.opts[0] if is_option else (param.metavar or param.name)
    if value is None or value == []:
        return Problem("it is missing", _example(ctx, name), name)
    from mtcli.core.config.fields import FieldKind, refused

    kind, limits = param.type_descriptor, param.type_descriptor.parameter_info
    if kind.is_choice and not is_option:
        words = [f"{ctx.command_path} {choice}" for choice in kind.choices]
        return Problem(f"there is no {ctx.command_path} {value}", " or ".join(words))
    if kind.is_choice:
        return refused(name, FieldKind(str, tuple(kind.choices)), value)
    if kind.annotation in (int, float):
        range = FieldKind(kind.annotation, low=limits.min, high=limits.max)
        return refused(name, range, value, param.default)
    message = error.format_message().rstrip(".")
    return Problem(message[0].lower() + message[1:], _usage(ctx), name)


class Target(NamedTuple):
    """The function of a subcommand (`module:function`), how its docstring begins, and the example
    at the end of its help."""

    target: str
    help: str
    example: str


# fmt: off
COMMANDS: dict[str, Target] = {
    name: Target(f"mtcli.commands.{name}:{name}", purpose, f"mtcli {words}")
    for name, purpose, words in (
        ("curate", "Clean, filter, deduplicate and decontaminate a corpus",
         "curate pages more.jsonl --output corpus"),
        ("preprocess", "Turn text into token files",
         "preprocess texts --output data/texts --tokenizer train:8192"),
        ("select", "Choose a core-set of the training data",
         "select --data texts --model a --fraction 0.1 --output s.json"),
        ("data", "Say which documents a training step consumed",
         "data explain runs/first --step 100"),
        ("config", "Show, compare and explain run configs",
         "config show tiny --set train.steps=1000"),
        ("plan", "Check a run config; predict its memory, step time and bubble",
         "plan llama-3.1-70b --gpus 512 --device h100 --tokens 1T"),
        ("doctor", "Examine machine, devices, installation; exchange and GEMM",
         "doctor --json doctor.json"),
        ("calibrate", "Measure a device for plans: GEMMs, copy, attention, links",
         "calibrate --output h100.json"),
        ("train", "Train or fine-tune a model from a config",
         "train tiny --set data.train=data/texts --nproc 2"),
        ("sweep", "Train many models of one shape as one array",
         "sweep runs/a --vary optimizer.lr=1e-3,3e-3 --output sweeps/lr"),
        ("runs", "List runs: state, step, loss, tokens, time, size",
         "runs compare first second --output compare.html"),
        ("eval", "Evaluate a checkpoint on published tasks or your own",
         "eval runs/a --task lambada=test.jsonl --json eval.json"),
        ("generate", "Sample text from a checkpoint",
         "generate runs/a --prompt 'Once upon a time' --max-tokens 50"),
        ("profile", "Run a few steps of a config with timers",
         "profile tiny --nproc 2 --set parallel.pp=2 --report step.html"),
        ("shard", "Convert and reshard checkpoints",
         "shard runs/first model --to hf --verify"),
    )
}
# fmt: on
# What other tools call a command.
MEANT = {
    **dict.fromkeys(("finetune", "fine-tune", "pretrain", "sft", "fit", "resume"), "train"),
    **dict.fromkeys(("clean", "dedup", "deduplicate", "filter", "decontaminate"), "curate"),
    **dict.fromkeys(("tokenize", "prepare", "tokenise"), "preprocess"),
    **dict.fromkeys(("evaluate", "test", "validate", "lm_eval", "score"), "eval"),
    **dict.fromkeys(("sample", "infer", "inference", "chat", "predict"), "generate"),
    **dict.fromkeys(("coreset", "core-set", "craig", "dsir", "subset", "choose"), "select"),
    **dict.fromkeys(("convert", "export", "reshard", "merge", "upcycle", "inspect"), "shard"),
    **dict.fromkeys(("search", "estimate", "presets", "check"), "plan"),
    **dict.fromkeys(("env", "diagnose", "info", "health", "versions"), "doctor"),
    **dict.fromkeys(("list", "ls", "status", "watch", "plot", "compare", "prune"), "runs"),
    **dict.fromkeys(("bench", "benchmark", "trace", "measure"), "profile"),
}


class LazyGroup(TyperGroup):
    """The group of `COMMANDS`: names and help come from the table, options from the module."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Lists the names, in the order a run meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand:
        """Imports and returns the command of that name.

        Raises MtcliError with the closest name where there is none (exit 2).
        """
        if cmd_name not in COMMANDS:
            from mtcli.core.config.synonyms import closest  # here, not above: --help needs none

            near = f"; did you mean {MEANT[cmd_name]!r}?" if cmd_name in MEANT else ""
            hint = "`mtcli --help` lists the commands" + (near or closest(cmd_name, COMMANDS))
            raise wrong(f"there is no command {cmd_name!r}", hint)
        return load(cmd_name)

    def format_commands(self, ctx: typer.Context, formatter: "HelpFormatter") -> None:
        """Writes the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


def load(name: str) -> TyperCommand:
    """Imports the module of a registered name, and returns its Typer command."""
    module, _, function = COMMANDS[name].target.partition(":")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    epilog = f"Example: {COMMANDS[name].example}"
    single.command(name, cls=Command, epilog=epilog)(getattr(import_module(module), function))
    return get_command(single)


def _print_version(requested: bool) -> None:
    if requested:
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
