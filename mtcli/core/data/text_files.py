"""Reads the files of published data sets, with errors that name the line."""

from pathlib import Path

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import read_untrusted

WHICH = "is it the data set's own file, and whole? docs/eval.md says what each data set is"


def read_text(path: Path, field: str = "--task") -> str:
    """Reads a file. Raises MtcliError when it is unreadable, empty, or not UTF-8 (with line)."""
    try:
        raw = read_untrusted(path)
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", WHICH, field) from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise bad_line(path, line, f"byte {raw[error.start]:#04x} is not UTF-8", field) from error
    if not text.strip():
        raise wrong(f"{path} is empty: {len(raw)} bytes, none of them text", WHICH, field)
    return text.replace("\r\n", "\n")


def bad_line(path: Path, line: int, what: str, field: str = "--task") -> MtcliError:
    """The error for one line of a file that `field` names."""
    return wrong(f"{path}, line {line}: {what}", WHICH, field)
