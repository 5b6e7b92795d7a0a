"""Reads the documents of a corpus: records with an id, a source, a text and whatever else they had.

An id that a record lacks is made of its file's name, relative to the folder that holds all inputs,
and its line: where a corpus lies, and in which order it is named, changes no id. Keys sort as ids
do: numbers before text before made ids, which go by line.
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

WET = ".wet"  # extracted text, in WARC's format
CURATE_KINDS: Kinds = KINDS | {".warc": "warc", WET: "warc"}
BLOCK_BYTES = 8 << 20  # of input, that a worker does at a time
DIGITS = 31  # of a number's key, moved up by OFFSET so that none is negative
OFFSET = 10**30
LINE_DIGITS = 12


@dataclass(slots=True)
class Document:
    """A document on its way through the stages; `html` is what `extract` makes its text of."""

    key: bytes
    source: str
    text: str
    size: int  # bytes of UTF-8
    fields: dict[str, Any] = field(default_factory=dict)
    html: bytes | None = None


class BadRecord(NamedTuple):
    """A record that cannot be read: where, and why; line 0 is the rest of a damaged file."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''}: {self.reason}"


class PassedOver(NamedTuple):
    """A record that is sound and no document, such as a WARC file's answer of 404: why."""

    reason: str


class CorpusFiles(NamedTuple):
    """The files of a corpus, sorted by their names, which are relative to what holds them all."""

    sources: tuple[SourceFile, ...]
    names: Mapping[str, str]  # by path
    left_out: Mapping[str, int]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(source.size for source in self.sources)


def find_files(inputs: Sequence[str], kind: FileKind | None = None) -> CorpusFiles:
    """Finds the files that `inputs` name, each once. Raises MtcliError for what is not there."""
    if not inputs:
        raise wrong("no input", "give files, folders or globs of WARC, JSON lines, text, Parquet")
    listing = find_sources(inputs, kind, CURATE_KINDS)
    once = {os.path.realpath(source.path): source for source in listing.sources}
    parent = os.path.commonpath([os.path.dirname(path) for path in once])
    named = sorted(
        (PurePosixPath(os.path.relpath(path, parent)).as_posix(), source._replace(path=path))
        for path, source in once.items()
    )
    sources = tuple(source for _, source in named)
    return CorpusFiles(sources, {source.path: name for name, source in named}, listing.left_out)


def blocks_of(inputs: CorpusFiles, blank: bool) -> list[TextBlock]:
    """Divides a corpus into blocks of work; where, depends on names and sizes alone."""
    return list(cut(inputs.sources, blank, BLOCK_BYTES))


def stem(name: str) -> str:
    """A file's name without folders and endings: the source of records that name none."""
    path = PurePosixPath(name)
    if path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
    if path.suffix == WET:  # of x.warc.wet.gz
        path = path.with_suffix("")
    return path.stem if path.suffix in CURATE_KINDS else path.name


def key_of(identity: Any) -> bytes | None:
    """The bytes that sort as ids do; None for what is no id."""
    if isinstance(identity, str):
        return b"1" + identity.encode("utf-8", "surrogatepass")
    if isinstance(identity, int) and not isinstance(identity, bool) and abs(identity) < OFFSET:
        return b"0%0*d" % (DIGITS, identity + OFFSET)
    return None


def made_key(name: str, line: int) -> bytes:
    """The key of a record without an id."""
    return b"2%s:%0*d" % (os.fsencode(name), LINE_DIGITS, line)


def id_of(key: bytes) -> str | int:
    """The id of a key."""
    kind, body = key[:1], key[1:]
    if kind == b"0":
        return int(body) - OFFSET
    if kind == b"1":
        return body.decode("utf-8", "surrogatepass")
    name, _, line = body.rpartition(b":")
    return f"{os.fsdecode(name)}:{int(line)}"
