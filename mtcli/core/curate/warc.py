"""Reads WARC files, and makes text of their HTML: fastwarc, then resiliparse or jusText.

Of a crawl's WARC the documents are HTML pages; of its WET they are texts, which pass `extract` as
they are. A document's id is the record's own, or made of the file and the record's number; `url`
and `date` are kept beside it.
"""

import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from typing import Any

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import open_untrusted, shown
from mtcli.core.curate.batch import Batch
from mtcli.core.curate.config import ExtractConfig
from mtcli.core.curate.documents import BadRecord, Document, PassedOver, key_of, made_key, stem
from mtcli.core.curate.extras import require
from mtcli.core.data.compressed import pieces
from mtcli.core.data.documents import HELD_BYTES
from mtcli.core.data.sources import SourceFile
from mtcli.core.runtime.process_pool import Progress

HTML = ("text/html", "application/xhtml+xml")
PAGES = ("response", "resource")
TEXTS = "conversion"  # of WET files: text/plain in UTF-8
ENCODINGS = ("Content-Encoding", "Transfer-Encoding")
END = b"\r\n\r\n"
Extract = Callable[[bytes], str]


def read_warc(
    source: SourceFile, name: str, html: bool, progress: Progress
) -> Iterator[Document | BadRecord | PassedOver]:
    """Yields the texts of a WET file's conversions and, where `html` says that they will be
    extracted, the HTML pages that were answered with 200; compressed or not.

    Other records are passed over. A record of more than HELD_BYTES is bad; so is what a damaged
    file ends in.
    """
    warc = require("fastwarc.warc", "extract")
    number = last = end = 0
    with open_untrusted(source.path) as file:
        stream = _Stream(pieces(file, source.compression, source.path))
        records = warc.ArchiveIterator(stream, parse_http=True, auto_decode="all")
        while True:
            number += 1
            try:
                record = next(records, None)
                if record is None:
                    break
                end = _end(record)
                document = _document(record, name, number, html)
            except Exception as error:  # a library's own, of many kinds, for a damaged record
                ended = stream.error or error
                yield BadRecord(name, number, f"a damaged WARC record: {ended}")
                return
            progress(file.tell() - last)
            last = file.tell()
            yield document
        progress(source.size - last)
        # The library takes what is left of a record for the end of the file; a length that is too
        # long takes the records after it.
        if end > stream.place:
            yield BadRecord(name, number - 1, "the file ends inside a WARC record")
        elif number == 1 or stream.error or stream.end != END:
            yield BadRecord(name, number, "the file ends inside a WARC record")


class _Stream(io.RawIOBase):
    """A file of pieces; `end` are the last bytes that were read, `error` what ended it early."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.parts, self.held, self.place = parts, b"", 0
        self.end, self.error = b"", None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """The place reached so far, which is all that the library asks for."""
        assert (offset, whence) == (0, io.SEEK_CUR), "a stream goes on"
        return self.place

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; none at the end."""
        while not self.held:
            try:
                self.held = next(self.parts, b"")
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                self.error = error
            if not self.held:
                return b""
        size = len(self.held) if size < 0 else size
        taken, self.held = self.held[:size], self.held[size:]
        self.end, self.place = (self.end + taken[-len(END) :])[-len(END) :], self.place + len(taken)
        return taken


def _end(record: Any) -> int:
    """Finds where a record says that its content ends, with the shortest header that says what it
    has."""
    headers = record.headers
    lines = (headers.status_line, *(f"{name}: {value}" for name, value in headers.items()), "")
    header = sum(len(line) + 2 for line in lines)
    return int(record.stream_pos) + header + int(headers.get("Content-Length") or 0)


def _document(record: Any, name: str, number: int, html: bool) -> Document | BadRecord | PassedOver:
    headers = record.headers
    role = headers.get("WARC-Type") or "no type"
    if role not in (*PAGES, TEXTS):
        return PassedOver(f"WARC records: {shown(role)}")
    status, kind, encoded = 200, headers.get("Content-Type") or "", False
    if record.http_headers is not None:
        status = record.http_headers.status_code
        encoded = any(record.http_headers.get(name) for name in ENCODINGS)
        kind = record.http_content_type or record.http_headers.get("Content-Type") or ""
    kind = kind.partition(";")[0].strip().lower()
    if status != 200:
        return PassedOver(f"answers with status {status}")
    if not kind.startswith("text/plain" if role == TEXTS else HTML):
        return PassedOver(f"content of type {shown(kind or 'unknown')}")
    if role != TEXTS and not html:
        return PassedOver("HTML, and the stages have no extract")
    if record.content_length > HELD_BYTES:
        return BadRecord(name, number, f"a record of {record.content_length:,} bytes")
    size = record.content_length
    content = record.reader.read()
    if not encoded and len(content) != size:
        raise ValueError(f"{len(content):,} bytes of {size:,}")
    identity = (headers.get("WARC-Record-ID") or "").strip("<>")
    key = key_of(identity) if identity else made_key(name, number)
    assert key is not None, "text is an id"
    fields = {"url": headers.get("WARC-Target-URI"), "date": headers.get("WARC-Date")}
    source = stem(name)
    given = {field: value for field, value in fields.items() if value is not None}
    if role != TEXTS:
        return Document(key, source, "", len(content), given, content)
    try:
        return Document(key, source, content.decode().strip(), len(content), given)
    except UnicodeDecodeError as error:
        why = f"byte {content[error.start]:#04x} of a text is not UTF-8"
        return BadRecord(name, number, why)


def make_extract(config: ExtractConfig) -> Callable[[Batch], None]:
    """The stage: text out of pages; other documents pass as they are."""
    make = {"resiliparse": _resiliparse, "justext": _justext}[config.engine]
    return partial(_extract, make(config))


def _extract(extract: Extract, batch: Batch) -> None:
    for index in batch.alive():
        document = batch.documents[index]
        if document.html is None:
            continue
        try:
            text = extract(document.html).strip()
        except (ValueError, UnicodeError, RecursionError) as error:
            batch.drop(index, "extract", f"not HTML: {type(error).__name__}")
            continue
        document.html = None
        text = text.encode("utf-8", "replace").decode()
        document.text, document.size = text, len(text.encode())
        if not text:
            batch.drop(index, "extract", "no main content")
    batch.changed()


def _resiliparse(_: ExtractConfig) -> Extract:
    encoding = require("resiliparse.parse.encoding", "extract")
    html2text = require("resiliparse.extract.html2text", "extract")

    def extract(html: bytes) -> str:
        page = encoding.bytes_to_str(html, encoding.detect_encoding(html))
        return str(html2text.extract_plain_text(page, main_content=True, alt_texts=False))

    return extract


def _justext(config: ExtractConfig) -> Extract:
    justext = require("justext", "extract with jusText")
    encoding = require("resiliparse.parse.encoding", "extract")
    if config.stop_words not in (known := sorted(justext.get_stoplists())):
        near = get_close_matches(config.stop_words, known, 3) or known[:3]
        message = f"jusText has no stop words of {config.stop_words!r}"
        raise wrong(message, " or ".join(map(repr, near)), "extract.stop_words")
    words = justext.get_stoplist(config.stop_words)

    def extract(html: bytes) -> str:
        page = encoding.bytes_to_str(html, encoding.detect_encoding(html))
        paragraphs = justext.justext(page.encode(), words, encoding="utf-8")
        return "\n\n".join(part.text for part in paragraphs if not part.is_boilerplate)

    return extract
