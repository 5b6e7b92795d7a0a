"""Reads untrusted files (regular ones only), parses JSON and TOML, and formats values for messages.

Opening never waits for a pipe or device. The kind of file is read from the open file, not from its
name, which could be replaced in between. Links are followed, as the Hugging Face cache uses them.
Texts are refused on which the standard library's parsers raise RecursionError or take hours.
"""

import errno
import json
import os
import re
import reprlib
import stat
import tomllib
from collections.abc import Sequence
from datetime import date, time
from pathlib import Path
from typing import IO, Any, TypeGuard

from mtcli.core.config.errors import wrong

MAX_BYTES = 1 << 30  # of a file that is read into memory, where its reader names no limit
# A FIFO is opened without waiting for a writer, a terminal without becoming this process's own.
QUIETLY = os.O_NONBLOCK | os.O_NOCTTY
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
MAX_TOML_BYTES = 1 << 20
MAX_KEY_PARTS = 64  # tomllib takes the square of their number: 2 s for 8000
_LONG_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_KEY_PARTS}}}"""
)
MAX_LISTED = 5  # names in an error
MAX_INTEGER = 2**1000  # float holds it
SHORT = {"maxlevel": 2, "maxstring": 80, "maxother": 80, "maxlong": 40, "maxdict": 4, "maxlist": 17}


def open_untrusted(path: str | Path, buffering: int = -1) -> IO[bytes]:
    """Opens a regular file to be read.

    Raises OSError for anything else; its strerror says what the file is.
    """
    return open(path, "rb", buffering, opener=_open_regular)


def open_to_lock(path: str | Path) -> IO[bytes]:
    """Opens as `open_untrusted`, but also for writing: NFS and Lustre grant no exclusive lock
    without."""
    return open(path, "r+b", opener=_open_regular)


def read_untrusted(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Reads a regular file. Raises OSError for any other, and for more than `most` bytes."""
    with open_untrusted(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def append_untrusted(path: str | Path) -> IO[bytes]:
    """Opens or creates a regular file, in a possibly untrusted folder, to append to and read.

    Raises OSError for anything else, and for a link, which could lead to a file of the user's.
    """
    return open(path, "a+b", opener=lambda name, flags: _open_regular(name, flags | os.O_NOFOLLOW))


def _open_regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | QUIETLY, 0o666)
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind in (stat.S_IFREG, stat.S_IFDIR):  # open() refuses a folder by itself
        return handle
    os.close(handle)
    what = KINDS.get(kind, "no file")
    raise OSError(errno.EINVAL, f"it is {what}, and a regular file is needed", path)


def parse_json(text: str | bytes) -> Any:
    """Parses JSON in UTF-8. Raises ValueError, and nothing else, for other text."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load_json(
    path: str | Path, hint: str, unread: str, most: int = MAX_BYTES, field: str = ""
) -> Any:
    """Parses a JSON file. Raises MtcliError with `hint`, or `unread` where it cannot be read."""
    try:
        return parse_json(read_untrusted(path, most))
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", unread, field) from None
    except ValueError as error:
        raise wrong(f"{path} is not JSON: {error}", hint, field) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. Raises ValueError, and nothing else, for other text."""
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"it has {len(text)} characters, and {MAX_TOML_BYTES} are read at most")
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MAX_KEY_PARTS} parts")
    try:
        table = tomllib.loads(text)
        _require_short_integers(table)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return table


def _require_short_integers(value: Any) -> None:
    """Raises ValueError for an integer of TOML that no message can show: Python formats none of
    over 4300 digits, and 0x may begin one of any length."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _require_short_integers(inner)
    elif isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise ValueError(f"an integer has {value.bit_length()} bits, and 1000 are the most")


def is_text(value: Any) -> bool:
    """Says whether a value of JSON is a string that UTF-8 can encode: half of a surrogate pair is
    not."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def names_a_file(text: str) -> bool:
    """Says whether a text can be a path: not empty, which would be the current folder, and without
    NUL bytes."""
    return bool(text) and "\0" not in text


def is_number(value: Any) -> TypeGuard[int | float]:
    """Says whether a value of JSON is a number that float can hold; Python's booleans are none."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < MAX_INTEGER
    return isinstance(value, float)


class _Shown(reprlib.Repr):
    """A formatter of values as TOML has them, at any depth."""

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(SHORT)

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_date(self, value: date, level: int) -> str:
        return value.isoformat()

    repr_datetime = repr_date

    def repr_time(self, value: time, level: int) -> str:
        return value.isoformat()

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


def shown(value: Any) -> str:
    """Formats a value for a message, as TOML has it; shortens long and deep ones."""
    return _Shown().repr(value)


def listed(names: Sequence[str]) -> str:
    """Joins names for a message: the first few, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
