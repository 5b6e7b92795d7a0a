"""Reads the files of published datasets, compressed or not, with errors that name the line."""

from codecs import BOM_UTF8
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Literal

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import MAX_BYTES, open_untrusted, parse_json, read_untrusted
from mtcli.core.data.compressed import COMPRESSIONS, DAMAGE, pieces

WHICH = (
    "is it the data set's own file, and whole? docs/reference/eval.md says what each data set is"
)


def read_text(path: Path, field: str = "--task") -> str:
    """Reads a file. Raises MtcliError where it is unreadable, empty, or not UTF-8 (with line)."""
    try:
        raw = _decompressed(path) if path.suffix in COMPRESSIONS else read_untrusted(path)
    except (*DAMAGE, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise wrong(f"{path} cannot be read: {why}", WHICH, field) from error
    raw = raw.removeprefix(BOM_UTF8)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise bad_line(path, line, f"byte {raw[error.start]:#04x} is not UTF-8", field) from error
    if not text.strip():
        raise wrong(f"{path} is empty: {len(raw)} bytes, none of them text", WHICH, field)
    return text.replace("\r\n", "\n")


def _decompressed(path: Path) -> bytes:
    """Decompresses a file. Raises OSError for more than MAX_BYTES of contents."""
    parts, size = [], 0
    with open_untrusted(path) as file:
        for piece in pieces(file, path.suffix, str(path)):
            parts.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise OSError(f"it holds more than {MAX_BYTES} bytes")
    return b"".join(parts)


def json_form(text: str) -> Literal["lines", "document"] | None:
    """Detects JSON: "lines" for an object per line, or "document"; None for other text."""
    start = text.lstrip()
    if not start.startswith(("{", "[")):
        return None
    for part, form in ((start.partition("\n")[0], "lines"), (start, "document")):
        try:
            value = parse_json(part)
        except ValueError:
            continue
        if form == "document" or isinstance(value, dict):
            return form  # type: ignore[return-value]
    return None


def json_of(text: str, path: Path, line: int, field: str) -> Any:
    """Parses the JSON that begins in a line of a file. Raises MtcliError with the line."""
    try:
        return parse_json(text)
    except JSONDecodeError as error:
        at = line + error.lineno - 1
        raise bad_line(path, at, f"not JSON: {error.msg}", field) from error
    except ValueError as error:
        raise bad_line(path, line, f"not JSON: {error}", field) from error


def bad_line(path: Path, line: int, what: str, field: str = "--task") -> MtcliError:
    """Builds the error of one line of a file that `field` names."""
    return wrong(f"{path}, line {line}: {what}", WHICH, field)
