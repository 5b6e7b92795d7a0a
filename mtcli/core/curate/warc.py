"""Reads WARC files with fastwarc, and extracts the text of their HTML with resiliparse or jusText.

A WARC file's documents are its HTML pages; a WET file's are texts, which pass `extract` unchanged.
A document's id is the record's, or made of the file and the record's number; `url` and `date` are
kept as fields.
"""

import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import shown
from mtcli.core.curate.batch import Batch
from mtcli.core.curate.config import ExtractConfig
from mtcli.core.curate.documents import BadRecord, Document, PassedOver, key_of, made_key, stem
from mtcli.core.curate.extras import require
from mtcli.core.curate.page_limits import (
    MAX_BYTES,
    MAX_SECONDS,
    TooSlow,
    require_readable,
    time_limit,
)
from mtcli.core.data.compressed import pieces
from mtcli.core.data.sources import SourceFile
from mtcli.core.runtime.process_pool import Progress
from mtcli.core.runtime.remote import open_input

HTML = ("text/html", "application/xhtml+xml")
PAGES = ("response", "resource")
TEXTS = "conversion"  # of WET files: text/plain in UTF-8
END = b"\r\n\r\n"
Extract = Callable[[bytes], str]


def read_warc(
    source: SourceFile, name: str, html: bool, progress: Progress
) -> Iterator[Document | BadRecord | PassedOver]:
    """Yields the texts of a WET file's conversions and, where `html`, the HTML pages with status
    200.

    Files may be compressed. Other records are passed over. A record of more than MAX_BYTES, a page
    of more than MAX_DEPTH and the end of a damaged file are bad records.
    """
    warc = require("fastwarc.warc", "extract")
    number = last = end = 0
    with open_input(source.path, source.size) as file:
        stream = _Stream(pieces(file, source.compression, source.path))
        records = warc.ArchiveIterator(stream, parse_http=True, auto_decode="none")
        while True:
            number += 1
            try:
                record = next(records, None)
                if record is None:
                    break
                end = _end(record)
                document = _document(record, name, number, html)
            except MtcliError:  # of the network
                raise
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
    """A file read by pieces; `end` holds the last bytes read, `error` the one that ended it
    early."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.parts, self.held, self.place = parts, b"", 0
        self.end = b""
        self.error: Exception | None = None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Returns the current position, the only one that the library asks for."""
        assert (offset, whence) == (0, io.SEEK_CUR), "a stream goes on"
        return self.place

    def read(self, size: int = -1) -> bytes:
        """Reads at most `size` bytes; none at the end."""
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
    """Computes where a record's content ends by its own length, assuming the shortest header with
    its fields."""
    headers = record.headers
    lines = (headers.status_line, *(f"{name}: {value}" for name, value in headers.items()), "")
    header = sum(len(line) + 2 for line in lines)
    return int(record.stream_pos) + header + int(headers.get("Content-Length") or 0)


def _document(record: Any, name: str, number: int, html: bool) -> Document | BadRecord | PassedOver:
    if reason := _passed_over(record, html):
        return PassedOver(reason)
    size, http = record.content_length, record.http_headers
    if size > MAX_BYTES:
        return BadRecord(name, number, f"a record of {size:,} bytes")
    stored = record.reader.read()
    if len(stored) != size:
        raise ValueError(f"{len(stored):,} bytes of {size:,}")
    try:
        content = _decoded(stored, dict(http.items()) if http else {})
        return _made(record, content, name, number)
    except (ValueError, OSError, zlib.error) as error:
        return BadRecord(name, number, str(error))


def _passed_over(record: Any, html: bool) -> str | None:
    """Says why a record is no document; None where it is one."""
    http, role = record.http_headers, record.headers.get("WARC-Type") or "no type"
    kind = (http and record.http_content_type) or (http or record.headers).get("Content-Type") or ""
    kind = kind.partition(";")[0].strip().lower()
    if role not in (*PAGES, TEXTS):
        return f"WARC records: {shown(role)}"
    if http and http.status_code != 200:
        return f"answers with status {http.status_code}"
    if not kind.startswith("text/plain" if role == TEXTS else HTML):
        return f"content of type {shown(kind or 'unknown')}"
    return None if role == TEXTS or html else "HTML, and the stages have no extract"


def _made(record: Any, content: bytes, name: str, number: int) -> Document:
    """Builds the document of a record's content.

    Raises ValueError for a text that is not UTF-8, and for a page that is too deep or has a tag
    with too many attributes.
    """
    headers, html, text = record.headers, None, ""
    if headers.get("WARC-Type") == TEXTS:
        text = _text(content)
    else:
        require_readable(html := content)
    identity = (headers.get("WARC-Record-ID") or "").strip("<>")
    key = key_of(identity) if identity else made_key(name, number)
    assert key is not None, "text is an id"
    fields = {"url": headers.get("WARC-Target-URI"), "date": headers.get("WARC-Date")}
    given = {field: value for field, value in fields.items() if value is not None}
    return Document(key, stem(name), text, len(content), given, html)


def _text(content: bytes) -> str:
    try:
        return content.decode().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {content[error.start]:#04x} of a text is not UTF-8") from None


def _decoded(content: bytes, headers: Mapping[str, str]) -> bytes:
    """Decodes a page's transfer and content encoding.

    Raises ValueError for more than MAX_BYTES, and OSError or zlib.error for damage.
    """
    stream_io = require("fastwarc.stream_io", "extract")
    named = {name.lower(): value.lower() for name, value in headers.items()}
    if "chunked" in named.get("transfer-encoding", ""):
        content = stream_io.ChunkedReader(io.BytesIO(content)).read(MAX_BYTES + 1)
    encodings = named.get("content-encoding", "").split(",")
    for encoding in reversed([one.strip() for one in encodings]):
        if encoding in ("gzip", "x-gzip"):
            content = stream_io.GzipReader(io.BytesIO(content)).read(MAX_BYTES + 1)
        elif encoding == "br":
            content = stream_io.BrotliReader(io.BytesIO(content)).read(MAX_BYTES + 1)
        elif encoding == "deflate":  # with zlib's header or, as some servers send it, bare
            bits = zlib.MAX_WBITS if content[:1] == b"x" else -zlib.MAX_WBITS
            content = zlib.decompressobj(bits).decompress(content, MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"a page of more than {MAX_BYTES:,} bytes once inflated")
    return content


def make_extract(config: ExtractConfig) -> Callable[[Batch], None]:
    """Builds the stage that extracts the text of pages; other documents pass unchanged."""
    make = {"resiliparse": _resiliparse, "justext": _justext}[config.engine]
    lxml = ["lxml.etree"] * (config.engine == "justext")
    unreadable = tuple(require(module, "extract").LxmlError for module in lxml)
    return partial(_extract, make(config), unreadable)


def _extract(extract: Extract, unreadable: tuple[type[Exception], ...], batch: Batch) -> None:
    refused: tuple[type[Exception], ...] = (ValueError, RecursionError, *unreadable)
    for index in batch.alive():
        document = batch.documents[index]
        if document.html is None:
            continue
        try:
            with time_limit():
                text = extract(document.html).strip()
        except TooSlow:
            batch.drop(index, "extract", f"more than {MAX_SECONDS:g} s of a processor")
            continue
        except refused as error:
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
    if config.stop_words not in (stop_lists := sorted(justext.get_stoplists())):
        near = get_close_matches(config.stop_words, stop_lists, 3) or stop_lists[:3]
        message = f"jusText has no stop words of {config.stop_words!r}"
        raise wrong(message, " or ".join(map(repr, near)), "extract.stop_words")
    words = justext.get_stoplist(config.stop_words)

    def extract(html: bytes) -> str:
        page = encoding.bytes_to_str(html, encoding.detect_encoding(html))
        paragraphs = justext.justext(page.encode(), words, encoding="utf-8")
        return "\n\n".join(part.text for part in paragraphs if not part.is_boilerplate)

    return extract
