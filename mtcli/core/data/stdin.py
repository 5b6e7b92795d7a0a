"""Standard input as files: written aside a block at a time, so that every worker can read some."""

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from mtcli.core.data.corpus import BLOCK_BYTES, STDIN, Kind, Source
from mtcli.core.data.documents import end_of_last

BOUNDARIES = {"jsonl": (b"\n",), "text": (b"\n\n", b"\n\r\n")}


def spool(stream: BinaryIO, blank: bool, folder: Path) -> Iterator[Source]:
    """The stream as files of about BLOCK_BYTES in `folder`, written as they are asked for.

    JSON lines where the first character is a brace, else text: cut at blank lines where they
    divide documents (`blank`), else one file that is one document. The caller removes the files.
    """
    left = stream.read(BLOCK_BYTES)
    start = left.removeprefix(codecs.BOM_UTF8).lstrip()
    kind: Kind = "jsonl" if start.startswith(b"{") else "text"
    if kind == "text" and not blank:
        yield _write(folder / "0", kind, 0, _rest(left, stream))
        return
    number, line, ended = 0, 0, len(left) < BLOCK_BYTES
    while left:
        end = len(left) if ended else end_of_last(BOUNDARIES[kind], left)
        if end:
            yield _write(folder / str(number), kind, line, [left[:end]])
            number, line = number + 1, line + left.count(b"\n", 0, end)
        left = left[end:]
        if not ended:
            data = stream.read(BLOCK_BYTES)
            ended = len(data) < BLOCK_BYTES
            left += data


def _rest(head: bytes, stream: BinaryIO) -> Iterator[bytes]:
    while head:
        yield head
        head = stream.read(BLOCK_BYTES)


def _write(path: Path, kind: Kind, first_line: int, parts: Iterable[bytes]) -> Source:
    with open(path, "wb") as file:
        size = sum(file.write(part) for part in parts)
    return Source(str(path), kind, "", size, STDIN, first_line)
