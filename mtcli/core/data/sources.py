"""Finds the inputs that the user named, and divides them into blocks of work.

A block is the unit of a worker: some files, or a byte range of one file that begins and ends
between documents. The output does not depend on block boundaries.
"""

import codecs
import glob
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, BinaryIO, Literal, NamedTuple, get_args

from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.nameable import near_path
from mtcli.core.config.untrusted import listed, open_untrusted
from mtcli.core.data.compressed import COMPRESSIONS, inner_name
from mtcli.core.runtime.remote import is_remote, list_remote, open_input, path_of

FileKind = Literal["text", "jsonl", "csv", "tsv", "parquet", "html", "warc"]
# By the ending of a name, under that of a compression; a file of another needs its kind named.
KINDS: dict[str, FileKind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".tokens": "text",  # WikiText's
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
Kinds = Mapping[str, FileKind]
# Often beside a corpus, to describe it: of a folder they are read only where a kind is named.
BESIDE = {".md", ".csv", ".tsv"}
PAGES = {".html", ".htm", ".warc"}  # whose text `mtcli curate` extracts
STDLIB, STDIN = "stdlib", "-"
# Of `mtcli curate`, beside its shards.
REPORT, REPORT_HTML, REMOVED = "report.json", "report.html", "removed.jsonl.zst"
NOT_CORPUS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
BLOCK_BYTES = 4 << 20
# Where documents may end.
BOUNDARIES: dict[FileKind, re.Pattern[bytes]] = {
    kind: re.compile(rb"\n[^\S\n]*\n" if kind == "text" else rb"\n") for kind in get_args(FileKind)
}
USUAL = {"text": (b"\n\n", b"\n\r\n")}  # found from the end, a hundred times as fast


class SourceFile(NamedTuple):
    """A file to read."""

    path: str  # or its address
    kind: FileKind
    compression: str  # "" or one of COMPRESSIONS
    size: int  # bytes on disk
    name: str = ""  # what messages call it, where that is not its path
    first_line: int = 0  # lines of `name` that come before the file
    version: str = ""  # of an address: what changes with its contents

    @property
    def facts(self) -> list[object]:
        """Its name, size and time, of which one differs where its contents do."""
        changed = self.version if is_remote(self.path) else os.stat(self.path).st_mtime_ns
        return [self.path, self.size, changed]


class FileRange(NamedTuple):
    """Bytes start .. stop of a source: all of it, unless it is uncompressed and large."""

    source: SourceFile
    start: int
    stop: int


class TextBlock(NamedTuple):
    """A block of work; `number` is its index in the output."""

    number: int
    pieces: tuple[FileRange, ...]

    @property
    def size(self) -> int:
        """The bytes on disk."""
        return sum(piece.stop - piece.start for piece in self.pieces)


class SourceList(NamedTuple):
    """The files to read, and counts of the other files in folders, by suffix."""

    sources: list[SourceFile]
    left_out: dict[str, int]


def find_sources(
    inputs: Sequence[str], kind: FileKind | None = None, kinds: Kinds = KINDS
) -> SourceList:
    """Finds the files that `inputs` name, in order; those of a folder or glob are sorted by path.

    A file's suffix decides its format by `kinds`, unless `kind` does. Raises MtcliError for an
    input that is missing, holds nothing readable or has another suffix.
    """
    left_out: Counter[str] = Counter()
    formats = _Kinds(kinds, kind)
    by_input = collect_errors(*(partial(_named, name, formats, left_out) for name in inputs))
    return SourceList(list(chain(*by_input)), dict(sorted(left_out.items())))


def require_used(sources: Sequence[SourceFile], text_key: str, blank: bool) -> None:
    """Raises MtcliError for flags that apply to no file: a key other than `text`, and blank lines
    that divide texts."""
    kinds, problems = {source.kind for source in sources}, []
    if blank and "text" not in kinds:
        problems.append(Problem("no input is plain text", "leave --split-on out", "--split-on"))
    if text_key != "text" and kinds <= {"text", "html", "warc"}:
        problems.append(
            Problem("no input has keys or columns", "leave --text-key out", "--text-key")
        )
    if sources and problems:
        raise MtcliError(*problems)


def cut(sources: Iterable[SourceFile], blank: bool, size: int = BLOCK_BYTES) -> Iterator[TextBlock]:
    """Divides `sources` into blocks of about `size` bytes: small files together, large ones split.

    JSON lines are split after a line, text with `blank` after a blank line, other files not at all.
    Sources are consumed one by one, as blocks are requested.
    """
    pieces: list[FileRange] = []
    number, filled = 0, 0
    for source in sources:
        for piece in _pieces(source, blank, size):
            if pieces and filled + piece.stop - piece.start > size:
                yield TextBlock(number, tuple(pieces))
                number, pieces, filled = number + 1, [], 0
            pieces.append(piece)
            filled += piece.stop - piece.start
    if pieces:
        yield TextBlock(number, tuple(pieces))


class _Kinds(NamedTuple):
    """A table of formats by suffix, or the one that the user names for all files."""

    by_ending: Kinds
    named: FileKind | None

    def of(self, path: Path, within_folder: bool = False) -> FileKind | None:
        """Returns a file's format by its suffix, without that of a compression; None for an unknown
        one."""
        inner = inner_name(path)
        if self.named or (within_folder and inner.suffix in BESIDE):
            return self.named
        by_suffix = self.by_ending.get(inner.suffix)
        return None if by_suffix == "parquet" and inner is not path else by_suffix

    @property
    def accepted(self) -> str:
        """Words the suffixes and formats that are read."""
        endings = ", ".join(ending for ending in self.by_ending if ending != ".parquet")
        formats = "|".join(dict.fromkeys(self.by_ending.values()))
        compressed = " ".join(COMPRESSIONS)
        return f"files end in .parquet, or {endings}, also {compressed}; or --format {formats}"


def _named(name: str, kinds: _Kinds, left_out: Counter[str]) -> list[SourceFile]:
    if name == STDLIB:
        return _stdlib()
    if is_remote(name):
        return _remote(name, kinds, left_out)
    if os.path.isdir(name):
        return _folder(Path(name), kinds, left_out)
    return [_source(Path(name), kinds)] if os.path.exists(name) else _matches(name, kinds)


def _remote(name: str, kinds: _Kinds, left_out: Counter[str]) -> list[SourceFile]:
    """Lists the files of an address; of a folder, those of a known suffix."""
    sources, inputs = [], list_remote(name)
    for address, size, version in inputs:
        path = path_of(address)
        within_folder = len(inputs) > 1 or path.name != path_of(name).name
        if kind := kinds.of(path, within_folder):
            compression = path.suffix if path.suffix in COMPRESSIONS and kind != "parquet" else ""
            sources.append(SourceFile(address, kind, compression, size, version=version))
        else:
            left_out[_ending(path)] += 1
    if not sources:
        raise wrong(f"{name} holds no file to read: {told(left_out)}", kinds.accepted)
    return sources


def _stdlib() -> list[SourceFile]:
    """Lists the running Python's standard library: its .py files without tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (
        path
        for path in root.rglob("*.py")
        if not NOT_CORPUS.intersection(path.relative_to(root).parts[:-1])
    )
    return [SourceFile(str(path), "text", "", path.stat().st_size) for path in sorted(files)]


def _folder(folder: Path, kinds: _Kinds, left_out: Counter[str]) -> list[SourceFile]:
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name.startswith(".") or _is_of_curate(path):
            continue
        if path.is_file() and kinds.of(path, within_folder=True):
            files.append(path)
        else:
            left_out[_ending(path) if path.is_file() else "pipes, devices and broken links"] += 1
    if not files:
        skipped = f", but others: {told(left_out)}" if left_out else ""
        described = f"; a folder's {', '.join(sorted(BESIDE))} files are read where they or a "
        hint = f"{described}--format are named" if BESIDE & left_out.keys() else ""
        of_pages = PAGES & left_out.keys() - kinds.by_ending.keys()
        pages = f"mtcli curate makes text of {', '.join(sorted(of_pages))}; " if of_pages else ""
        raise wrong(f"{folder} holds no file to read{skipped}", pages + kinds.accepted + hint)
    return [_source(path, kinds) for path in files]


def _is_of_curate(path: Path) -> bool:
    """Says whether a file is no document, but what `mtcli curate` says of the shards beside it."""
    return path.name in (REMOVED, REPORT_HTML) and (path.parent / REPORT).exists()


def told(left_out: Mapping[str, int]) -> str:
    """Words counts by suffix, the largest first: "2 .csv, 1 .md"."""
    by_count = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    return listed([f"{count:,} {ending}" for ending, count in by_count])


def _ending(path: Path) -> str:
    """Returns the suffix of a name, with the one before a compression's."""
    inner = inner_name(path)
    return inner.suffix + path.suffix * (inner is not path) or "without an ending"


def _matches(pattern: str, kinds: _Kinds) -> list[SourceFile]:
    paths = [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in paths if path.is_file() and not _is_of_curate(path)]
    if not files:
        what = "no file matches" if glob.has_magic(pattern) else "there is no file or folder"
        hint = "inputs are files, folders, globs, addresses, - for standard input, or stdlib"
        raise wrong(f"{what} {pattern or repr(pattern)}", hint + near_path(pattern))
    return [_source(path, kinds) for path in files]


def _source(path: Path, kinds: _Kinds) -> SourceFile:
    kind = kinds.of(path)
    if kind is None:
        raise wrong(f"{path} is of no kind that is known by its name", kinds.accepted)
    try:
        with open_untrusted(path, 0) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        hint = "inputs are files that may be read, and - for standard input"
        raise wrong(f"{path} cannot be read: {error.strerror}", hint) from None
    compression = path.suffix if path.suffix in COMPRESSIONS and kind != "parquet" else ""
    return SourceFile(str(path), kind, compression, size)


def _pieces(source: SourceFile, blank: bool, size: int) -> Iterator[FileRange]:
    cuttable = source.kind == "jsonl" or (source.kind == "text" and blank)
    if source.compression or not cuttable or source.size <= size:
        yield FileRange(source, 0, source.size)
        return
    with open_input(source.path, source.size) as file:
        start = 0
        while start < source.size:
            stop = _cut(file, start + size, source, blank)
            yield FileRange(source, start, stop)
            start = stop


def _cut(file: IO[bytes], near: int, source: SourceFile, blank: bool) -> int:
    """Finds the first offset from `near` on that is between documents."""
    if near >= source.size:
        return source.size
    file.seek(near)
    _is_blank(file)  # the line that `near` is in the middle of
    while blank and source.kind == "text":
        if _is_blank(file):  # or the end of the file
            break
    return min(file.tell(), source.size)


def _is_blank(file: IO[bytes]) -> bool:
    """Says whether the next line, read a block at a time, is blank."""
    is_blank = True
    while part := file.readline(BLOCK_BYTES):
        is_blank = is_blank and not part.strip()
        if part.endswith(b"\n"):
            break
    return is_blank


def spool(
    stream: BinaryIO, kind: FileKind | None, blank: bool, folder: Path
) -> Iterator[SourceFile]:
    """Spools the stream into files of about BLOCK_BYTES in `folder`, as they are requested.

    Without a `kind`, the format is JSON lines where the first character is a brace, else text. A
    table is one file, and so is text that blank lines do not divide (`blank`). At most a block of a
    longer document is held in memory. The caller removes the files.
    """
    left = stream.read(BLOCK_BYTES)
    start = left.removeprefix(codecs.BOM_UTF8).lstrip()
    kind = kind or ("jsonl" if start.startswith(b"{") else "text")
    if kind != "jsonl" and not (kind == "text" and blank):
        chunks = iter(partial(stream.read, BLOCK_BYTES), b"")
        yield _write(folder / "0", kind, 0, chain([left], chunks))
        return
    number, line = 0, 0
    while left:
        document = _SpooledBlock(left, stream, kind)
        yield _write(folder / str(number), kind, line, document)
        number, line, left = number + 1, line + document.lines, document.left


class _SpooledBlock:
    """A block of a stream: iterates over its bytes, up to the last document boundary in `left`, or
    the first one after.

    After iteration, `lines` counts its lines, and `left` holds the bytes read beyond it.
    """

    def __init__(self, left: bytes, stream: BinaryIO, kind: FileKind) -> None:
        self.left, self.lines = left, 0
        self._stream, self._kind = stream, kind

    def __iter__(self) -> Iterator[bytes]:
        end = end_of_last(self._kind, self.left)
        while not end and (data := self._stream.read(BLOCK_BYTES)):
            unfinished = begun(self._kind, self.left)
            taken, self.left = self.left[: len(self.left) - len(unfinished)], unfinished + data
            self.lines += taken.count(b"\n")
            yield taken
            end = end_of_first(self._kind, self.left)
        end = end or len(self.left)
        self.lines += self.left.count(b"\n", 0, end)
        yield self.left[:end]
        self.left = self.left[end:] or self._stream.read(BLOCK_BYTES)


def _write(path: Path, kind: FileKind, first_line: int, parts: Iterable[bytes]) -> SourceFile:
    with open(path, "wb") as file:
        size = sum(file.write(part) for part in parts)
    return SourceFile(str(path), kind, "", size, STDIN, first_line)


def end_of_last(kind: FileKind, data: bytes) -> int:
    """Finds the end of the last document boundary in `data`; 0 where there is none."""
    boundaries = ((data.rfind(usual), len(usual)) for usual in USUAL.get(kind, (b"\n",)))
    end = max(at + length if at >= 0 else 0 for at, length in boundaries)
    if end or kind != "text":
        return end
    return max((match.end() for match in BOUNDARIES[kind].finditer(data)), default=0)


def end_of_first(kind: FileKind, data: bytes) -> int:
    """Finds the end of the first document boundary in `data`; 0 where there is none."""
    match = BOUNDARIES[kind].search(data)
    return match.end() if match else 0


def begun(kind: FileKind, data: bytes) -> bytes:
    """Returns the tail of `data` that may begin a document boundary: an unfinished blank line."""
    line = data[max(0, data.rfind(b"\n")) :] if kind == "text" else b""
    return line if line.startswith(b"\n") and line.isspace() else b""
