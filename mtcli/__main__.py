"""Runs the app and turns every error into `error:` and `hint:` lines on stderr.

Exit codes are `config.errors.Exit`. A traceback is printed only with MTCLI_TRACEBACK=1.
"""

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import typer

from mtcli.core.config.errors import Exit, MtcliError, Problem, visible
from mtcli.streams import hold_streams


def main() -> None:
    """Runs `mtcli` on the process's arguments and exits with its code."""
    if sys.getfilesystemencoding() != "utf-8":
        # As in Latin-1's locale: names and texts of files are in UTF-8, and those of its ranks.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that has no such letter gets its code
            stream.reconfigure(errors="backslashreplace")
    hold_streams()
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except (BrokenPipeError, MtcliError) as error:  # a reader that left needs no word, as `| head`
        if isinstance(error, MtcliError):
            _fail(str(error), error.code)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered is lost
        code = code or Exit.FAILED
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # A rank has said all. About one teardown of the interpreter in ten aborts in a thread of
        # gloo's ("terminate called without an active exception", torch 2.13), after a good run.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line, or shows the help where it is empty; returns the exit code."""
    try:
        from mtcli.cli import app

        code = app(list(arguments) or ["--help"], prog_name="mtcli", standalone_mode=False)
        return code or Exit.DONE  # a number where the command raised typer.Exit
    except MtcliError as error:
        return _fail(str(error), error.code)
    except typer.TyperException as error:
        return _fail(_usage(error), Exit.WRONG_INPUT)
    except KeyboardInterrupt:  # outside of the command, where Typer does not catch it
        return Exit.INTERRUPTED
    except Exception as error:
        if os.environ.get("MTCLI_TRACEBACK") == "1":
            raise
        what = f"unexpected {type(error).__name__}: {error}".splitlines()[0]
        problem = Problem(what, "set MTCLI_TRACEBACK=1 to see where it came from")
        return _fail(str(problem), Exit.FAILED)


def _fail(text: str, code: Exit) -> Exit:
    sys.stderr.write(visible(text) + "\n")
    return code


def _usage(error: typer.TyperException) -> str:
    """Words a wrong command line before any command (an unknown flag of mtcli's own)."""
    message = error.format_message().rstrip(".")  # all that Typer raises for usage have it, and ctx
    command = error.ctx.command_path if error.ctx else "mtcli"
    return str(Problem(message[0].lower() + message[1:], f"`{command} --help` shows its usage"))


if __name__ == "__main__":
    main()
