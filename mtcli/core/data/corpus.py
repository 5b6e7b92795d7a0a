"""What there is to read: inputs named by the user, as files, cut into blocks of work.

A block is what one worker does at a time: some files, or a range of bytes of one file that begins
and ends between documents. Where blocks are cut never shows in the output.
"""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from mtcli.core.spec.errors import every, wrong
from mtcli.core.spec.untrusted import open_untrusted

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
ACCEPTED = ".txt, .jsonl (either plain or .gz .zst .xz .bz2) and .parquet"
STDLIB, STDIN = "stdlib", "-"
NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
BLOCK_BYTES = 4 << 20

Kind = Literal["text", "jsonl", "parquet"]


class Source(NamedTuple):
    """A file to read."""

    path: str
    kind: Kind
    compression: str  # "" or one of COMPRESSIONS
    size: int  # bytes on disk
    name: str = ""  # what messages call it, where that is not its path
    first_line: int = 0  # lines of `name` that come before the file


class Piece(NamedTuple):
    """Bytes start .. stop of a source: all of it unless it is plain and large."""

    source: Source
    start: int
    stop: int


class Block(NamedTuple):
    """What a worker does at a time; `number` is its place in the output."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """The files that `inputs` name, in order; folders and globs give theirs sorted by path.

    Raises MtcliError for an input that is not there, holds nothing readable or has another ending.
    """
    return list(chain(*every(*(partial(_named, name) for name in inputs))))


def cut(sources: Iterable[Source], blank: bool, size: int = BLOCK_BYTES) -> Iterator[Block]:
    """`sources` as blocks of about `size` bytes: small files together, large plain files cut.

    JSON lines are cut after a line, text that is split on blank lines (`blank`) after such a line,
    other files not at all. Sources are taken one by one, as blocks are asked for.
    """
    number, pieces, filled = 0, [], 0
    for source in sources:
        for piece in _pieces(source, blank, size):
            if pieces and filled + piece.stop - piece.start > size:
                yield Block(number, tuple(pieces))
                number, pieces, filled = number + 1, [], 0
            pieces.append(piece)
            filled += piece.stop - piece.start
    if pieces:
        yield Block(number, tuple(pieces))


def _named(name: str) -> list[Source]:
    if name == STDLIB:
        return _stdlib()
    if os.path.isdir(name):
        return _folder(Path(name))
    return [_source(Path(name))] if os.path.isfile(name) else _matches(name)


def _stdlib() -> list[Source]:
    """The running Python's standard library: its .py files without tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (
        path
        for path in root.rglob("*.py")
        if not NOT_CORPUS.intersection(path.relative_to(root).parts[:-1])
    )
    return [Source(str(path), "text", "", path.stat().st_size) for path in sorted(files)]


def _folder(folder: Path) -> list[Source]:
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and _kind(path) and not path.name.startswith(".")
    ]
    if not files:
        raise wrong(f"{folder} holds no file to read", f"files end in {ACCEPTED}")
    return [_source(path) for path in files]


def _matches(pattern: str) -> list[Source]:
    paths = [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise wrong(
            f"no input {pattern or repr(pattern)}",
            "inputs are files, folders, globs, - for standard input, or stdlib",
        )
    return [_source(path) for path in files]


def _source(path: Path) -> Source:
    kind = _kind(path)
    if kind is None:
        raise wrong(f"{path} is of no kind that can be read", f"files end in {ACCEPTED}")
    if not os.access(path, os.R_OK):
        raise wrong(f"{path} cannot be read: permission denied", "chmod +r it")
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return Source(str(path), kind, compression, path.stat().st_size)


def _kind(path: Path) -> Kind | None:
    """What the name's ending says, under the compression's; None where it is not ours."""
    kinds: dict[str, Kind] = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
    inner = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    if inner is not path and inner.suffix == ".parquet":
        return None
    return kinds.get(inner.suffix)


def _pieces(source: Source, blank: bool, size: int) -> Iterator[Piece]:
    cuttable = source.kind == "jsonl" or (source.kind == "text" and blank)
    if source.compression or not cuttable or source.size <= size:
        yield Piece(source, 0, source.size)
        return
    with open_untrusted(source.path) as file:
        start = 0
        while start < source.size:
            stop = _cut(file, start + size, source, blank)
            yield Piece(source, start, stop)
            start = stop


def _cut(file: BinaryIO, near: int, source: Source, blank: bool) -> int:
    """The first place from `near` on where no document is open."""
    if near >= source.size:
        return source.size
    file.seek(near)
    file.readline()  # the line that `near` is in the middle of
    while blank and source.kind == "text":
        line = file.readline()
        if not line.strip():  # a blank line, or the end of the file
            break
    return min(file.tell(), source.size)
