"""Documents out of files: a piece of a source in, texts and complaints out, in bounded memory."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from mtcli.core.data.corpus import Piece, Source
from mtcli.core.data.zst import ZstFile
from mtcli.core.spec.errors import wrong
from mtcli.core.spec.untrusted import open_untrusted

WINDOW = 4 << 20  # bytes looked at together
BOM = codecs.BOM_UTF8
# One or more lines of nothing but space; a line before them ends without its line break.
BLANK_LINES = re.compile(r"\r?\n(?:[^\S\n]*\n)+")


class Reading(NamedTuple):
    """How to read: JSON's key, whether blank lines divide texts, whether long ones may be cut."""

    text_key: str
    blank: bool
    cuttable: bool


class Text(NamedTuple):
    """A document, or a part of a very long one that the next Text goes on with."""

    text: str
    size: int  # bytes of UTF-8
    ends: bool = True


class Bad(NamedTuple):
    """A document that cannot be read: the line (or row) of its file, counted from 1, and why."""

    line: int
    kind: str
    reason: str


def read_documents(piece: Piece, reading: Reading) -> Iterator[Text | Bad]:
    """The documents of `piece`, in order; lines of `Bad` are counted from the start of the file.

    Raises MtcliError for a file that cannot be opened or is damaged.
    """
    source = piece.source
    try:
        if source.kind == "parquet":
            yield from _parquet(source, reading.text_key)
        elif source.kind == "jsonl":
            for first_line, chunk in _chunks(piece, (b"\n",)):
                yield from _json_lines(chunk, first_line, reading.text_key)
        elif reading.blank:
            for first_line, chunk in _chunks(piece, (b"\n\n", b"\n\r\n")):
                yield from _blank_separated(chunk, first_line)
        else:
            yield from _whole(source, reading.cuttable)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise wrong(f"{source.path} is damaged: {error}", "compress or copy it again") from None
    except OSError as error:
        raise wrong(f"{source.path} cannot be read: {error}", "copy it again") from None


def lines_before(path: str, offset: int) -> int:
    """How many lines of the file end before byte `offset`."""
    lines = 0
    with open_untrusted(path) as file:
        while offset > 0 and (data := file.read(min(WINDOW, offset))):
            lines += data.count(b"\n")
            offset -= len(data)
    return lines


def end_of_last(boundaries: tuple[bytes, ...], data: bytes) -> int:
    """Where the last of any of the boundaries in `data` ends; 0 where there is none."""
    found = ((data.rfind(boundary), len(boundary)) for boundary in boundaries)
    return max(at + length if at >= 0 else 0 for at, length in found)


def _chunks(piece: Piece, boundaries: tuple[bytes, ...]) -> Iterator[tuple[int, bytes]]:
    """(lines before it, bytes) of about WINDOW, each ending after a boundary or with the piece."""
    line, left, kept = 0, b"", piece.stop - piece.start
    with _open(piece.source) as file:
        if not piece.source.compression:
            file.seek(piece.start)
        while True:
            compressed = bool(piece.source.compression)
            data = file.read(WINDOW if compressed else min(WINDOW, kept))
            kept -= len(data)
            whole = left + data
            if not data:
                break
            end = end_of_last(boundaries, whole)
            if end == 0:
                left = whole
                continue
            chunk, left = whole[:end], whole[end:]
            yield line, _without_bom(chunk, line or piece.start)
            line += chunk.count(b"\n")
    if left:
        yield line, _without_bom(left, line or piece.start)


def _without_bom(chunk: bytes, before: int) -> bytes:
    return chunk.removeprefix(BOM) if before == 0 else chunk


def _json_lines(chunk: bytes, first_line: int, key: str) -> Iterator[Text | Bad]:
    for number, line in enumerate(_decoded_lines(chunk), first_line + 1):
        if isinstance(line, Bad):
            yield line._replace(line=number)
        elif line and not line.isspace():
            yield _record(line, number, key)


def _decoded_lines(chunk: bytes) -> Iterator[str | Bad]:
    """Lines of UTF-8; decoding all at once is five times faster than one by one."""
    try:
        yield from chunk.decode().split("\n")
    except UnicodeDecodeError:
        for line in chunk.split(b"\n"):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                yield Bad(0, "bad UTF-8", f"byte {line[error.start]:#04x} is not UTF-8")


def _record(line: str, number: int, key: str) -> Text | Bad:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Bad(number, "bad JSON", f"not JSON: {error}")
    if not isinstance(record, dict):
        return Bad(number, "bad JSON", f"{_json_type(record)}, not an object")
    if key not in record:
        known = ", ".join(map(repr, record)) or "none"
        return Bad(number, "missing key", f'no key "{key}": keys are {known}')
    return _text(record[key], number, key)


def _json_type(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", list: "an array", dict: "an object"}
    return names.get(type(value), "a string" if isinstance(value, str) else "a number")


def _text(value: object, number: int, key: str) -> Text | Bad:
    if not isinstance(value, str):
        return Bad(number, "not text", f'"{key}" is {_json_type(value)}, not a string')
    try:
        return Text(value, len(value) if value.isascii() else len(value.encode()))
    except UnicodeEncodeError:
        return Bad(number, "bad UTF-8", f'"{key}" holds half of a surrogate pair')


def _blank_separated(chunk: bytes, first_line: int) -> Iterator[Text | Bad]:
    try:
        text = chunk.decode()
    except UnicodeDecodeError:
        yield from _blank_separated_bytes(chunk, first_line)
        return
    for part in BLANK_LINES.split(f"\n\n{text}\n\n"):
        if part:
            yield Text(part, len(part.encode()))


def _blank_separated_bytes(chunk: bytes, first_line: int) -> Iterator[Text | Bad]:
    """The same by lines, for a chunk that is not all UTF-8: only its bad documents are lost."""
    block: list[bytes] = []
    for number, line in enumerate([*chunk.split(b"\n"), b""], first_line + 1):
        if line.strip():
            block.append(line)
        elif block:
            document, start = b"\n".join(block), number - len(block)
            block = []
            try:
                text = document.decode().removesuffix("\r")
                yield Text(text, len(text.encode()))
            except UnicodeDecodeError as error:
                yield _bad_byte(document, error.start, start)


def _bad_byte(data: bytes, at: int, line: int) -> Bad:
    line += data.count(b"\n", 0, at)
    return Bad(line, "bad UTF-8", f"byte {data[at]:#04x} is not UTF-8")


def _whole(source: Source, cuttable: bool) -> Iterator[Text | Bad]:
    """The file as one document, in parts where it is long and its tokenizer allows."""
    if not cuttable or (source.size <= WINDOW and not source.compression):
        with _open(source) as file:
            data = file.read().removeprefix(BOM)
        try:
            yield Text(data.decode(), len(data))
        except UnicodeDecodeError as error:
            yield _bad_byte(data, error.start, 1)
        return
    bad = _first_bad_byte(source)  # before any part is out: a document is read whole or not at all
    if bad:
        yield bad
        return
    decoder, text = codecs.getincrementaldecoder("utf-8-sig")(), ""
    with _open(source) as file:
        while data := file.read(WINDOW):
            text += decoder.decode(data)
            at = _safe_cut(text)
            if at:
                yield Text(text[:at], len(text[:at].encode()), ends=False)
                text = text[at:]
    yield Text(text, len(text.encode()))


def _safe_cut(text: str) -> int:
    """The last place where GPT-2's word pattern always ends a word: after a lone line break.

    `x\\ny` is x, a break and y, whatever x and y are but space; longer runs of space are cut by
    what follows them. 0 where there is no such place.
    """
    at = text.rfind("\n", 1, len(text) - 1)
    while at > 0 and (text[at - 1].isspace() or text[at + 1].isspace()):
        at = text.rfind("\n", 1, at)
    return max(at + 1, 0)


def _first_bad_byte(source: Source) -> Bad | None:
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with _open(source) as file:
        while True:
            data = file.read(WINDOW)
            held = decoder.getstate()[0]  # the start of a letter that the last window ended in
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                return _bad_byte(held + data, error.start, line)
            if not data:
                return None
            line += data.count(b"\n")


def _open(source: Source) -> BinaryIO:
    if source.compression == ".zst":
        return io.BufferedReader(ZstFile(source.path), WINDOW)
    file = open_untrusted(source.path)
    opener = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(source.compression)
    return file if opener is None else opener(file, "rb")


def _parquet(source: Source, key: str) -> Iterator[Text | Bad]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise wrong(
            f"{source.path} needs the package pyarrow", "pip install 'mtcli[data]'"
        ) from None
    try:
        with open_untrusted(source.path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            if key not in file.schema_arrow.names:
                known = ", ".join(file.schema_arrow.names)
                raise wrong(f'{source.path} has no column "{key}"', f"--text-key of: {known}")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[key]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _text(value, row, key)
    except pyarrow.lib.ArrowException as error:
        raise wrong(f"{source.path} is damaged: {error}", "write or copy it again") from None
