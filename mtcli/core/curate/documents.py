"""Reads the documents of a corpus: records with an id, a source, a text and other fields.

A record without an id gets one of its file's name, relative to the folder of all inputs, and its
line; it does not depend on where the corpus lies or on the order of the inputs. Keys sort as ids
do: numbers before text before generated ids, which sort by line.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.data.compressed import COMPRESSIONS
from mtcli.core.data.sources import (
    KINDS,
    FileKind,
    Kinds,
    SourceFile,
    TextBlock,
    cut,
    find_sources,
)
from mtcli.core.runtime.remote import is_remote

WET = ".wet"  # extracted text, in WARC's format
CURATE_KINDS: Kinds = KINDS | {
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".warc": "warc",
    WET: "warc",
}
BLOCK_BYTES = 8 << 20  # of input, that a worker does at a time
DIGITS = 31  # of a number's key, moved up by OFFSET so that none is negative
OFFSET = 10**30
LINE_DIGITS = 12


@dataclass(slots=True)
class Document:
    """A document on its way through the stages; `extract` makes its text of `html`."""

    key: bytes
    source: str
    text: str
    size: int  # bytes of UTF-8
    fields: dict[str, Any] = field(default_factory=dict)
    html: bytes | None = None


class BadRecord(NamedTuple):
    """A record that cannot be read: file, line and reason. Line 0 is the rest of a damaged file."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''}: {self.reason}"


class PassedOver(NamedTuple):
    """The reason why an intact record is no document, such as a WARC answer with status 404."""

    reason: str


class CorpusFiles(NamedTuple):
    """The files of a corpus, sorted by name; names are relative to their common folder."""

    sources: tuple[SourceFile, ...]
    names: Mapping[str, str]  # by path
    left_out: Mapping[str, int]

    @property
    def size(self) -> int:
        """The bytes on disk."""
        return sum(source.size for source in self.sources)


def find_files(inputs: Sequence[str], kind: FileKind | None = None) -> CorpusFiles:
    """Finds the files that `inputs` name, each once. Raises MtcliError for a missing input."""
    if not inputs:
        raise wrong("no input", "give files, folders or globs of HTML, WARC, JSON, text, Parquet")
    listing = find_sources(inputs, kind, CURATE_KINDS)
    once = {_place(source): source for source in listing.sources}
    parent = os.path.commonpath([os.path.dirname(path) for path in once])
    named = sorted(
        (
            PurePosixPath(os.path.relpath(path, parent)).as_posix(),
            source if is_remote(source.path) else source._replace(path=path),
        )
        for path, source in once.items()
    )
    sources = tuple(source for _, source in named)
    return CorpusFiles(sources, {source.path: name for name, source in named}, listing.left_out)


def _place(source: SourceFile) -> str:
    """Returns the absolute path of a file; an address is one, below the root."""
    return f"/{source.path}" if is_remote(source.path) else os.path.realpath(source.path)


def blocks_of(inputs: CorpusFiles, blank: bool) -> list[TextBlock]:
    """Divides a corpus into blocks of work, by the files' names and sizes alone."""
    return list(cut(inputs.sources, blank, BLOCK_BYTES))


def stem(name: str) -> str:
    """Returns a file's name without folders and suffixes: the source of records that name none."""
    path = PurePosixPath(name)
    if path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
    if path.suffix == WET:  # of x.warc.wet.gz
        path = path.with_suffix("")
    return path.stem if path.suffix in CURATE_KINDS else path.name


def key_of(identity: Any) -> bytes | None:
    """Encodes an id as bytes that sort as ids do; None where it is no id."""
    if isinstance(identity, str):
        return b"1" + identity.encode("utf-8", "surrogatepass")
    if isinstance(identity, int) and not isinstance(identity, bool) and abs(identity) < OFFSET:
        return b"0%0*d" % (DIGITS, identity + OFFSET)
    return None


def made_key(name: str, line: int) -> bytes:
    """Builds the key of a record without an id."""
    return b"2%s:%0*d" % (os.fsencode(name), LINE_DIGITS, line)


def id_of(key: bytes) -> str | int:
    """Decodes a key into its id."""
    kind, body = key[:1], key[1:]
    if kind == b"0":
        return int(body) - OFFSET
    if kind == b"1":
        return body.decode("utf-8", "surrogatepass")
    name, _, line = body.rpartition(b":")
    return f"{os.fsdecode(name)}:{int(line)}"
