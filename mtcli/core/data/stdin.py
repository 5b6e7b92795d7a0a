"""Standard input as files: written aside a block at a time, so that every worker can read some."""

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from mtcli.core.data.documents import begun, end_of_first, end_of_last
from mtcli.core.data.sources import BLOCK_BYTES, STDIN, FileKind, SourceFile


def spool(
    stream: BinaryIO, kind: FileKind | None, blank: bool, folder: Path
) -> Iterator[SourceFile]:
    """The stream as files of about BLOCK_BYTES in `folder`, written as they are asked for.

    Of a `kind`, or JSON lines where the first character is a brace, else text. Text that blank
    lines do not divide (`blank`) is one file that is one document, and a table is one file. Of a
    document that is longer than a block no more than a block is held. The caller removes the files.
    """
    left = stream.read(BLOCK_BYTES)
    start = left.removeprefix(codecs.BOM_UTF8).lstrip()
    kind = kind or ("jsonl" if start.startswith(b"{") else "text")
    if kind != "jsonl" and not (kind == "text" and blank):
        yield _write(folder / "0", kind, 0, _rest(left, stream))
        return
    number, line = 0, 0
    while left:
        document = _Block(left, stream, kind)
        yield _write(folder / str(number), kind, line, document)
        number, line, left = number + 1, line + document.lines, document.left


class _Block:
    """Bytes of a stream up to a place where documents end: the last in `left`, or the first behind.

    Once they are taken, `lines` says how many lines they are, and `left` is what was read after.
    """

    def __init__(self, left: bytes, stream: BinaryIO, kind: FileKind) -> None:
        self.left, self.lines = left, 0
        self._stream, self._kind = stream, kind

    def __iter__(self) -> Iterator[bytes]:
        end = end_of_last(self._kind, self.left)
        while not end and (data := self._stream.read(BLOCK_BYTES)):
            kept = begun(self._kind, self.left)
            taken, self.left = self.left[: len(self.left) - len(kept)], kept + data
            self.lines += taken.count(b"\n")
            yield taken
            end = end_of_first(self._kind, self.left)
        end = end or len(self.left)
        self.lines += self.left.count(b"\n", 0, end)
        yield self.left[:end]
        self.left = self.left[end:] or self._stream.read(BLOCK_BYTES)


def _rest(head: bytes, stream: BinaryIO) -> Iterator[bytes]:
    while head:
        yield head
        head = stream.read(BLOCK_BYTES)


def _write(path: Path, kind: FileKind, first_line: int, parts: Iterable[bytes]) -> SourceFile:
    with open(path, "wb") as file:
        size = sum(file.write(part) for part in parts)
    return SourceFile(str(path), kind, "", size, STDIN, first_line)
