"""Prints a command's answer: JSON with --json, tables otherwise, and errors in both forms.

With `--json -` stdout has the JSON and nothing else.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec

import typer

from mtcli.core.config.errors import MtcliError, visible

P = ParamSpec("P")


def write_json(data: object, target: str) -> None:
    """Writes `data` as JSON to a file, or to stdout where `target` is `-`.

    JSON has no NaN and no infinity, so such numbers become null. Raises MtcliError (exit 1) where
    writing fails.
    """
    from mtcli.core.runtime.json_text import json_text

    text = json_text(data)
    if target == "-":
        sys.stdout.write(text)
        return
    from mtcli.core.runtime.atomic_writes import aside

    with aside(target) as path:
        path.write_text(text, encoding="utf-8")


def answer(data: dict[str, Any], json_out: str | None) -> bool:
    """Writes a command's answer as JSON, if asked for; returns whether stdout is free for
    tables."""
    if json_out:
        write_json({"ok": True, "problems": []} | data, json_out)
    return json_out != "-"


def print_facts(rows: dict[str, str]) -> None:
    """Prints a table of names and values, with blanks for the names' underscores."""
    from mtcli.core.runtime.console import print_table

    print_table("", ("", ""), [[name.replace("_", " "), value] for name, value in rows.items()])


def echo(text: str, err: bool = False) -> None:
    """Prints a line on stdout or stderr, with control characters made visible."""
    typer.echo(visible(text), err=err)


def say_wrote(*paths: str | None) -> None:
    """Prints the names of written files on stderr; ignores None, a file that was not asked for."""
    for path in filter(None, paths):
        echo(f"wrote {path}", err=True)


@contextmanager
def refusing(json_out: str | None, **keys: object) -> Iterator[None]:
    """Inside, errors are also written as JSON to `json_out`, if given, with further `keys`.

    Of several ranks only the first writes.
    """
    try:
        yield
    except MtcliError as error:
        from mtcli.core.runtime.launch import environment_rank

        if json_out and environment_rank() == 0:
            write_json(error.as_json() | keys, json_out)
        raise


def answering(command: Callable[P, None]) -> Callable[P, None]:
    """Wraps a command with --json so that its errors are JSON too; see `refusing`."""

    @wraps(command)
    def answered(*arguments: P.args, **options: P.kwargs) -> None:
        target = options.get("json_out")
        with refusing(target if isinstance(target, str) else None):
            command(*arguments, **options)

    return answered
