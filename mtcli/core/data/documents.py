"""Reads documents out of files, and reasons for unreadable ones, in bounded memory.

`Reading.most` bounds the bytes of a document in memory. For compressed files and Parquet, so does a
bound on the ratio of content to file size.
"""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import IO, Any, NamedTuple

import numpy as np

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import listed, shown
from mtcli.core.data.compressed import DAMAGE, pieces, require_ratio
from mtcli.core.data.sources import (
    FileKind,
    FileRange,
    SourceFile,
    begun,
    end_of_first,
    end_of_last,
)
from mtcli.core.runtime.process_pool import Progress
from mtcli.core.runtime.remote import open_input

WINDOW = 4 << 20  # bytes looked at together
HELD_BYTES = 64 << 20  # of one document, where no flag says how many: ten million words
PARQUET_ROWS = 16  # read together: 1024 take no less time, and 64 times the memory
TOO_LARGE, DAMAGED = "too large", "damaged files"
BOM = codecs.BOM_UTF8
# One or more lines of nothing but space; a line before them ends without its line break.
BLANK_LINES = re.compile(r"\r?\n(?:[^\S\n]*\n)+")
WORD_END = re.compile(r"(?<=\S)[ \n]")
NEAR_END = 1 << 10  # letters in which most texts have such a place


class Reading(NamedTuple):
    """Options of reading: JSON's key, whether blank lines divide texts, whether long texts may be
    split, the most bytes of UTF-8 of a document (None: HELD_BYTES, unless it is plain text that is
    split), whether each Text carries its line and all keys of its record, and the JSON parser."""

    text_key: str
    blank: bool
    cuttable: bool
    max_bytes: int | None = None
    whole: bool = False
    parse: Callable[[str], Any] = json.loads

    @property
    def most(self) -> int:
        """The most bytes of a document that is held in memory as a whole."""
        return self.max_bytes or HELD_BYTES

    @property
    def most_of_line(self) -> int:
        """The most bytes of a line, with a document's other keys and escapes."""
        return max(self.most, HELD_BYTES)


class Text(NamedTuple):
    """A document, or a part of a very long one that the next Text continues."""

    text: str
    size: int  # bytes of UTF-8
    ends: bool = True
    line: int = 0  # or row, from 1, of its file range: where `Reading.whole`
    fields: dict[str, Any] | None = None  # its record, where `Reading.whole` and it has one


class Bad(NamedTuple):
    """An unreadable document: its line or row, from 1, and the reason. Line 0 is the rest of a
    damaged file."""

    line: int
    kind: str
    reason: str


def read_documents(
    piece: FileRange, reading: Reading, progress: Progress = lambda _: None
) -> Iterator[Text | Bad]:
    """Yields the documents of `piece` in order; lines of `Bad` are counted from its start.

    `progress` is called with bytes of the source. A damaged file yields all documents that end
    before the damage, then a Bad. Raises MtcliError for a file that cannot be opened, or
    decompresses to over MAX_RATIO times its size.
    """
    source = piece.source
    try:
        if not reading.cuttable:
            yield from _items(piece, reading, progress)
            return
        for item in _items(piece, reading, progress):
            if isinstance(item, Text) and item.ends:
                yield from _parts(item)
            else:
                yield item
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            message = f"{source.path} cannot be read: {error.strerror}"
            raise wrong(message, "copy it again") from None
        yield _damaged(error)


def count_lines(piece: FileRange, progress: Progress = lambda _: None) -> int:
    """Counts the line breaks in a file range, as it is on disk."""
    lines, left = 0, piece.stop - piece.start
    with open_input(piece.source.path, piece.source.size) as file:
        file.seek(piece.start)
        while left and (data := file.read(min(WINDOW, left))):
            lines, left = lines + _num_lines(data), left - len(data)
            progress(len(data))
    return lines


def _num_lines(data: bytes) -> int:
    """Counts line breaks, twice as fast as bytes.count."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))


def _items(piece: FileRange, reading: Reading, progress: Progress) -> Iterator[Text | Bad]:
    kind = piece.source.kind
    if kind == "parquet":
        yield from _parquet(piece.source, reading, progress)
    elif kind in ("csv", "tsv"):
        yield from _table(piece, reading, progress)
    elif kind == "text" and not reading.blank:
        yield from _whole(piece, reading, progress)
    else:
        most = reading.most_of_line if kind == "jsonl" else reading.most
        read = _json_lines if kind == "jsonl" else _blank_separated
        for first_line, chunk in _chunks(piece, kind, most, progress):
            if isinstance(chunk, Bad):
                yield chunk
            else:
                yield from read(chunk, first_line, reading)


@contextmanager
def _opened(piece: FileRange, progress: Progress) -> Iterator[Iterator[bytes]]:
    """Yields the bytes of a file range, decompressed, in windows of about WINDOW.

    Raises MtcliError where they exceed MAX_RATIO times the file, and the errors of
    `compressed.pieces`.
    """
    with open_input(piece.source.path, piece.source.size) as file:
        file.seek(piece.start)
        yield _windows(file, piece, progress)


def _windows(file: IO[bytes], piece: FileRange, progress: Progress) -> Iterator[bytes]:
    source, reported, total = piece.source, piece.start, 0
    if source.compression:
        chunks = pieces(file, source.compression, source.path)
    else:
        left = piece.stop - piece.start
        chunks = map(file.read, chain([WINDOW] * (left // WINDOW), [left % WINDOW]))
    window: list[bytes] = []
    size = 0
    try:
        for data in chunks:
            window.append(data)
            size, total = size + len(data), total + len(data)
            if source.compression:
                require_ratio(source.path, source.size, total)
            if size >= WINDOW:
                at = min(file.tell(), piece.stop)
                progress(at - reported)
                reported = at
                yield b"".join(window)
                window, size = [], 0
    except (*DAMAGE, OSError):
        progress(piece.stop - reported)
        if size:
            yield b"".join(window)
        raise
    progress(piece.stop - reported)
    if size:
        yield b"".join(window)


def _chunks(
    piece: FileRange, kind: FileKind, most: int, progress: Progress
) -> Iterator[tuple[int, bytes | Bad]]:
    """Yields (lines before, bytes) of about WINDOW, each ending at a document boundary or the
    range's end.

    A Bad replaces a document that reaches no boundary within `most` bytes and a WINDOW.
    """
    line, carried = 0, b""
    pending: list[bytes] = []  # windows since the last place
    with _opened(piece, progress) as windows:
        while data := carried or next(windows, b""):
            carried, tail = b"", begun(kind, pending[-1]) if pending else b""
            end = end_of_last(kind, tail + data) - len(tail)
            if end > 0:
                chunk = b"".join([*pending, data[:end]])
                pending = [data[end:]] if data[end:] else []
                yield line, _without_bom(chunk, line or piece.start)
                line += _num_lines(chunk)
            elif sum(map(len, pending)) <= most:
                pending.append(data)
            else:
                first = pending[0] if pending else data
                blank = first[: len(first) - len(first.lstrip())].count(b"\n")
                yield line, _too_large(line + blank + 1, most)
                lines, carried = _behind(kind, data, windows)
                line += lines + sum(part.count(b"\n") for part in pending)
                pending = []
    if pending:
        yield line, _without_bom(b"".join(pending), line or piece.start)


def _behind(kind: FileKind, data: bytes, windows: Iterator[bytes]) -> tuple[int, bytes]:
    """Skips to the next document boundary; returns the lines skipped, and the bytes read after
    it."""
    lines = 0
    for following in windows:
        tail = begun(kind, data)
        lines += data.count(b"\n", 0, len(data) - len(tail))
        data = tail + following
        if end := end_of_first(kind, data):
            return lines + data.count(b"\n", 0, end), data[end:]
    return lines + data.count(b"\n"), b""


def _damaged(error: Exception) -> Bad:
    return Bad(0, DAMAGED, f"the file is damaged: {error}")


def _too_large(line: int, most: int) -> Bad:
    return Bad(line, TOO_LARGE, f"a document of more than {most:,} bytes")


def _without_bom(chunk: bytes, lines_before: int) -> bytes:
    return chunk.removeprefix(BOM) if lines_before == 0 else chunk


def _json_lines(chunk: bytes, first_line: int, reading: Reading) -> Iterator[Text | Bad]:
    for number, line in enumerate(_decoded_lines(chunk), first_line + 1):
        if isinstance(line, Bad):
            yield line._replace(line=number)
        elif line and not line.isspace():
            yield _record(line, number, reading)


def _decoded_lines(chunk: bytes) -> Sequence[str | Bad]:
    """Decodes lines of UTF-8; decoding all at once is five times faster than one by one."""
    try:
        return chunk.decode().split("\n")
    except UnicodeDecodeError:
        return [_decoded_line(line) for line in chunk.split(b"\n")]


def _decoded_line(line: bytes) -> str | Bad:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return Bad(0, "bad UTF-8", f"byte {line[error.start]:#04x} is not UTF-8")


def _record(line: str, number: int, reading: Reading) -> Text | Bad:
    key = reading.text_key
    try:
        record = reading.parse(line)
    except (ValueError, RecursionError) as error:
        return Bad(number, "bad JSON", f"not JSON: {error}")
    if not isinstance(record, dict):
        return Bad(number, "bad JSON", f"{_json_type(record)}, not an object")
    if key not in record:
        names = listed([shown(name) for name in record]) or "none"
        return Bad(number, "missing key", f'no key "{key}": keys are {names}')
    return _text(record[key], number, reading, record)


def _json_type(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", list: "an array", dict: "an object"}
    return names.get(type(value), "a string" if isinstance(value, str) else "a number")


def _text(value: object, number: int, reading: Reading, fields: dict[str, Any]) -> Text | Bad:
    key = reading.text_key
    if not isinstance(value, str):
        return Bad(number, "not text", f'"{key}" is {_json_type(value)}, not a string')
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        return Bad(number, "bad UTF-8", f'"{key}" holds half of a surrogate pair')
    if size > reading.most:
        return _too_large(number, reading.most)
    return Text(value, size, True, number, fields if reading.whole else None)


def _blank_separated(chunk: bytes, first_line: int, reading: Reading) -> Iterator[Text | Bad]:
    try:
        parts = BLANK_LINES.split(f"\n\n{chunk.decode()}\n\n")
    except UnicodeDecodeError:
        parts = None
    texts = [Text(part, len(part.encode())) for part in parts or () if part]
    is_quick = parts is not None and not reading.whole
    if is_quick and all(text.size <= reading.most for text in texts):
        yield from texts
    else:
        yield from _blank_separated_bytes(chunk, first_line, reading.most)


def _blank_separated_bytes(chunk: bytes, first_line: int, most: int) -> Iterator[Text | Bad]:
    """Reads blank-separated documents by lines, so that a chunk loses only its bad ones."""
    block: list[bytes] = []
    for number, line in enumerate([*chunk.split(b"\n"), b""], first_line + 1):
        if line.strip():
            block.append(line)
        elif block:
            document, start = b"\n".join(block), number - len(block)
            block = []
            try:
                text = document.decode().removesuffix("\r")
            except UnicodeDecodeError as error:
                yield _bad_byte(document, error.start, start)
                continue
            size = len(text.encode())
            yield Text(text, size, line=start) if size <= most else _too_large(start, most)


def _bad_byte(data: bytes, at: int, line: int) -> Bad:
    line += data.count(b"\n", 0, at)
    return Bad(line, "bad UTF-8", f"byte {data[at]:#04x} is not UTF-8")


def _parts(text: Text) -> Iterator[Text]:
    """Splits a document into parts of about WINDOW characters at safe places."""
    characters, start, size = text.text, 0, WINDOW
    while start + size < len(characters):
        part = characters[start : start + size]
        if at := _safe_cut(part):
            yield Text(part[:at], len(part[:at].encode()), ends=False)
            start, size = start + at, WINDOW
        else:
            size *= 2
    last = characters[start:]
    yield Text(last, len(last.encode()) if start else text.size)


def _whole(piece: FileRange, reading: Reading, progress: Progress) -> Iterator[Text | Bad]:
    """Reads the file as one document, in parts where it is long and its tokenizer allows."""
    source = piece.source
    if not reading.cuttable or (source.size <= WINDOW and not source.compression):
        yield _held(piece, reading, progress)
        return

    def half(count: float) -> None:  # it is read twice
        progress(count / 2)

    # Before any part is out: a document is read whole or not at all.
    if fault := _fault(piece, reading, half):
        yield fault
        return
    decoder, text = codecs.getincrementaldecoder("utf-8-sig")(), ""
    with _opened(piece, half) as windows:
        for data in windows:
            text += decoder.decode(data)
            if at := _safe_cut(text):
                yield Text(text[:at], len(text[:at].encode()), ends=False)
                text = text[at:]
    yield Text(text, len(text.encode()))


def _held(piece: FileRange, reading: Reading, progress: Progress) -> Text | Bad:
    """Reads the file as one document, in memory."""
    windows, size = [], 0
    with _opened(piece, progress) as chunks:
        for data in chunks:
            windows.append(data)
            size += len(data)
            if size > reading.most:
                return _too_large(1, reading.most)
    data = b"".join(windows).removeprefix(BOM)
    try:
        return Text(data.decode(), len(data), line=1)
    except UnicodeDecodeError as error:
        return _bad_byte(data, error.start, 1)


def _safe_cut(text: str) -> int:
    """Returns the last offset where GPT-2's word pattern always ends a word: between a non-space
    and a space. 0 where there is none.

    No word continues into a space, and how spaces are divided depends on what follows them.
    """
    for start in (max(0, len(text) - NEAR_END), 0):
        if places := [match.start() for match in WORD_END.finditer(text, start)]:
            return places[-1]
    return 0


def _fault(piece: FileRange, reading: Reading, progress: Progress) -> Bad | None:
    """Words why a file cannot be read in parts: bytes that are not UTF-8, or too many of them."""
    decoder, line, size, uncut = codecs.getincrementaldecoder("utf-8")(), 1, 0, 0
    with _opened(piece, progress) as windows:
        for data in chain(windows, [b""]):
            undecoded = decoder.getstate()[0]  # the start of a letter that the last window ended in
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                return _bad_byte(undecoded + data, error.start, line)
            at = _safe_cut(text)
            size, uncut = size + len(data), len(text) - at + (0 if at else uncut)
            if reading.max_bytes and size > reading.max_bytes:
                return _too_large(1, reading.max_bytes)
            if uncut > reading.most:
                why = f"a document without space to cut it at for {reading.most:,} letters"
                return Bad(line, TOO_LARGE, why)
            line += data.count(b"\n")
    return None


def _table(piece: FileRange, reading: Reading, progress: Progress) -> Iterator[Text | Bad]:
    """Yields rows of CSV or TSV, quoted as spreadsheets do: the column `text_key` of the header.

    Raises MtcliError where quotes do not match, as the next row's start is then unknown.
    """
    source, key = piece.source, reading.text_key
    kind = source.kind.upper()
    lines = _Lines(piece, reading.most_of_line, progress)
    csv.field_size_limit(reading.most_of_line)
    rows = csv.reader(lines, delimiter="," if source.kind == "csv" else "\t", strict=True)
    try:
        header = next(rows, [])
        _require_column(source, key, header)
        column, ended = header.index(key), lines.row_ended()
        for row in rows:
            number, ended = ended + 1, lines.row_ended()
            if row and len(row) != len(header):
                why = f"{len(row)} fields, and the header has {len(header)}"
                yield Bad(number, f"bad {kind}", why)
            elif row:
                item = _text(row[column], number, reading, dict(zip(header, row, strict=True)))
                if isinstance(item, Bad) and item.kind == "bad UTF-8":
                    item = item._replace(reason=f'"{key}" is not UTF-8')
                yield item
    except csv.Error as error:
        message = f"{source.name or source.path}:{lines.line}: not {kind}: {error}"
        raise wrong(message, "double the quotes inside of a quoted field") from None


def _require_column(source: SourceFile, key: str, names: Sequence[str]) -> None:
    """Raises MtcliError unless exactly one column has the name."""
    if (count := names.count(key)) != 1:
        columns = listed([shown(name) for name in names])
        hint = f"--text-key of: {columns}" if columns else "its first line names the columns"
        hint = hint if count == 0 else "rename all but one"
        raise wrong(f'{source.path} has {count or "no"} column{"s" * (count > 1)} "{key}"', hint)


class _Lines:
    """Lines of a table for the csv module, with their line breaks; at most `most` bytes per row.

    Bytes that are not UTF-8 become surrogates. Raises MtcliError for a longer row.
    """

    def __init__(self, piece: FileRange, most: int, progress: Progress) -> None:
        self.line = 0  # the last that was given
        self._source, self._most, self._row_size = piece.source, most, 0
        self._lines = self._decoded(piece, progress)

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.line += 1
        self._row_size += len(line)
        self._require(self._row_size <= self._most)
        return line

    def row_ended(self) -> int:
        """Returns the last line of the row that was read."""
        self._row_size = 0
        return self.line

    def _decoded(self, piece: FileRange, progress: Progress) -> Iterator[str]:
        for _, chunk in _chunks(piece, piece.source.kind, self._most, progress):
            self._require(isinstance(chunk, bytes))
            assert isinstance(chunk, bytes)
            *lines, last = chunk.decode(errors="surrogateescape").split("\n")
            yield from (f"{line}\n" for line in lines)
            if last:
                yield last

    def _require(self, fits: bool) -> None:
        if not fits:
            where = f"{self._source.name or self._source.path}:{self.line + 1}"
            hint = "is a quote left open? else raise --max-document-bytes"
            raise wrong(f"{where}: a row of more than {self._most:,} bytes", hint)


def _parquet(source: SourceFile, reading: Reading, progress: Progress) -> Iterator[Text | Bad]:
    key, total = reading.text_key, 0
    rows = parquet_rows(source, None if reading.whole else [key], progress, key)
    for row, fields in enumerate(rows, start=1):
        if isinstance(fields, Bad):
            yield fields if fields.kind == DAMAGED else fields._replace(line=row)
            continue
        item = _text(fields[key], row, reading, fields)
        total += item.size if isinstance(item, Text) else 0
        # one entry of a dictionary may be every row's
        require_ratio(source.path, source.size, total)
        yield item


def parquet_rows(
    source: SourceFile,
    columns: Sequence[str] | None = None,
    progress: Progress = lambda _: None,
    required: str | None = None,
) -> Iterator[dict[str, Any] | Bad]:
    """Yields the rows of a Parquet file with these columns, all by default; a Bad for a row that
    cannot be read, and one at the end of a damaged file.

    Raises MtcliError where the column `required` or the package is missing, and for row groups
    that exceed MAX_RATIO.
    """
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise wrong(
            f"{source.path} needs the package pyarrow", "pip install 'mtcli[data]'"
        ) from None
    try:
        opened = open_input(source.path, source.size)
        with opened as raw, pyarrow.parquet.ParquetFile(raw) as file:
            names, metadata = file.schema_arrow.names, file.metadata
            if required is not None:
                _require_column(source, required, names)
            for group in map(metadata.row_group, range(metadata.num_row_groups)):
                # Not of the column alone: where its facts are damaged, pyarrow aborts the process.
                require_ratio(source.path, source.size, group.total_byte_size)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                yield from _records(batch)
                progress(source.size * len(batch) / metadata.num_rows)
    except (pyarrow.lib.ArrowException, UnicodeDecodeError) as error:  # the latter of a name
        yield _damaged(error)


def _records(batch: Any) -> list[Any]:
    """Converts a batch's rows into dicts; a Bad for a row with strings that are not UTF-8, or with
    a date that Python cannot hold."""
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            return [Bad(0, "bad values", f"a value cannot be read: {error}")]
    return [row for number in range(len(batch)) for row in _records(batch.slice(number, 1))]
