"""Reads the records of input files as documents."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mtcli.core.config.untrusted import is_text, listed, shown
from mtcli.core.curate.documents import (
    BadRecord,
    CorpusFiles,
    Document,
    PassedOver,
    key_of,
    made_key,
    stem,
)
from mtcli.core.curate.page_file import read_page
from mtcli.core.curate.parts import is_finite, load_line
from mtcli.core.curate.warc import read_warc
from mtcli.core.data.documents import Bad, Reading, Text, read_documents
from mtcli.core.data.sources import FileRange
from mtcli.core.runtime.process_pool import Progress


class Reader(NamedTuple):
    """A reader of file ranges. `lines_before` counts the lines before ranges that start inside a
    file; `html` says that a later stage extracts the text of pages."""

    reading: Reading
    names: Mapping[str, str]
    lines_before: Mapping[tuple[str, int], int]
    html: bool

    @staticmethod
    def of(
        files: CorpusFiles,
        text_key: str,
        blank: bool = False,
        lines_before: Mapping[tuple[str, int], int] | None = None,
        html: bool = False,
    ) -> "Reader":
        """Builds the reader of a corpus; where `blank`, blank lines divide its texts."""
        reading = Reading(text_key, blank, cuttable=False, whole=True, parse=load_line)
        return Reader(reading, files.names, lines_before or {}, html)

    def read(
        self, piece: FileRange, progress: Progress
    ) -> Iterator[Document | BadRecord | PassedOver]:
        """Yields the documents of a file range in order, with its bad records and those passed
        over."""
        path = piece.source.path
        name, lines_before = self.names[path], self.lines_before.get((path, piece.start), 0)
        if piece.source.kind == "warc":
            yield from read_warc(piece.source, name, self.html, progress)
            return
        if piece.source.kind == "html":
            yield read_page(piece.source, name, progress)
            return
        unnamed, is_parquet = stem(name), piece.source.kind == "parquet"
        for item in read_documents(piece, self.reading, progress):
            if isinstance(item, Bad):
                yield BadRecord(name, item.line and lines_before + item.line, item.reason)
            elif is_parquet and item.fields and not is_finite(item.fields):
                odd = [shown(key) for key, value in item.fields.items() if not is_finite(value)]
                reason = f"NaN or Infinity in {listed(odd)}, which JSON cannot write"
                yield BadRecord(name, item.line, reason)
            else:
                yield self._document(item, name, lines_before + item.line, unnamed)

    def _document(self, item: Text, name: str, line: int, unnamed: str) -> Document | BadRecord:
        text, size, _, _, fields = item
        fields = fields or {}  # read for this document alone
        pop = fields.pop
        pop(self.reading.text_key, None)
        identity, source = pop("id", None), pop("source", None)
        key = made_key(name, line) if identity is None else key_of(identity)
        if key is None:
            return BadRecord(name, line, '"id" is neither text nor a whole number below 10^30')
        if source is None:
            source = unnamed
        elif not is_text(source):
            return BadRecord(name, line, '"source" is no text')
        return Document(key, source, text, size, fields)
