"""Reads data files line by line: JSON lines, compressed or not, and as such the items of a JSON
array and the rows of Parquet."""

import json
import os
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterator
from io import BufferedReader
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import MAX_BYTES, open_untrusted, parse_json
from mtcli.core.data.bad_lines import AHEAD_BYTES, MAX_LINE_BYTES, BadLine
from mtcli.core.data.compressed import DAMAGE, open_decompressed, require_ratio
from mtcli.core.data.documents import DAMAGED, Bad, parquet_rows
from mtcli.core.data.sources import SourceFile
from mtcli.core.runtime.sandbox import OverLimit

Read = TypeVar("Read")

KINDS = "JSON lines (.jsonl, .jsonl.gz, .jsonl.zst), a JSON array (.json) or Parquet"


def read_lines(
    path: Path, begin: Callable[[bytes], Callable[[], Read]], field: str
) -> tuple[list[tuple[int, Read]], list[tuple[int, BadLine]]]:
    """Reads a file into (number, record) of each good line and (number, fault) of each bad one.
    Numbers start at 1; blank lines are skipped.

    `begin` is called some lines ahead, so that another process may work on them; it returns a
    function that returns the record. Both may raise BadLine.

    Raises MtcliError where the file, which `field` names, cannot be read, and OverLimit.
    """
    records: list[tuple[int, Read]] = []
    faults: list[tuple[int, BadLine]] = []
    begun: deque[tuple[int, int, Callable[[], Read]]] = deque()
    ahead = 0  # bytes of the lines that are begun

    def finish(most: int) -> None:
        nonlocal ahead
        while ahead > most:
            number, size, end = begun.popleft()
            ahead -= size
            try:
                records.append((number, end()))
            except BadLine as fault:
                faults.append((number, fault))
            except OverLimit as limit:
                raise OverLimit(f"{path}:{number}: {limit}") from None

    try:
        for number, line in enumerate(_lines_of(path, field), start=1):
            if isinstance(line, BadLine):
                faults.append((number, line))
                continue
            if line.isspace():
                continue
            try:
                begun.append((number, len(line), begin(line)))
                ahead += len(line)
            except BadLine as fault:
                faults.append((number, fault))
            finish(AHEAD_BYTES)
        finish(0)
    except (*DAMAGE, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise wrong(f"{path} cannot be read: {why}", f"name a file of {KINDS}", field) from None
    return records, sorted(faults, key=itemgetter(0))


def _lines_of(path: Path, field: str) -> Iterator[bytes | BadLine]:
    """Yields the lines of a file; items of an array and rows of Parquet as JSON.

    Raises OSError, the errors of `compressed.pieces`, and MtcliError where the file is damaged.
    """
    if path.suffix == ".parquet":
        yield from _rows(path, field)
        return
    if path.suffix == ".json" and path.with_suffix(".idx").exists():
        hint = f"name the prefix of the pair: {path.with_suffix('')}"
        raise wrong(f"{path} describes a pair of .bin and .idx", hint, field)
    with open_decompressed(path) as file:
        if file.peek(1).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
            yield from _items(file, path, field)
        else:
            yield from _lines(file)


def _lines(file: BufferedReader) -> Iterator[bytes]:
    """Yields the lines of a file; only the first MAX_LINE_BYTES + 1 bytes of a longer one."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        chunk = line
        while len(chunk) > MAX_LINE_BYTES and not chunk.endswith(b"\n"):
            chunk = file.readline(MAX_LINE_BYTES + 1)
        yield line


def _items(file: BufferedReader, path: Path, field: str) -> Iterator[bytes]:
    """Yields the items of a JSON array as lines."""
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        message = f"{path} is a JSON array of more than {MAX_BYTES:,} bytes"
        raise wrong(message, f"`jq -c '.[]' {path}` writes its items as JSON lines", field)
    try:
        items = parse_json(data.removeprefix(BOM_UTF8))
    except ValueError as error:
        hint = "write an object on each line of a .jsonl file, or mend the array"
        raise wrong(f"{path} begins as a JSON array, and is none: {error}", hint, field) from None
    yield from map(_line, items)


def _rows(path: Path, field: str) -> Iterator[bytes | BadLine]:
    """Yields the rows of Parquet as lines, without the fields that are null in them."""
    with open_untrusted(path) as file:
        source = SourceFile(str(path), "parquet", "", os.fstat(file.fileno()).st_size)
    total = 0
    for row in parquet_rows(source):
        if not isinstance(row, Bad):
            line = _line(_without_nulls(row))
            total += len(line)
            # one entry of a dictionary may be every row's
            require_ratio(path, source.size, total)
            yield line
        elif row.kind == DAMAGED:
            raise wrong(f"{path}: {row.reason}", "use another copy", field)
        else:
            yield BadLine(row.kind, row.reason)


def _line(value: Any) -> bytes:
    """Encodes a value as a line of JSON, with the words of what JSON has no value for."""
    return json.dumps(value, default=str).encode()


def _without_nulls(value: Any) -> Any:
    """Leaves out null fields: in a table, every struct has the fields of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
