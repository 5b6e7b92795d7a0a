"""Defines a batch of documents, the unit in which a worker's stages read text.

The lower-case text is one array of bytes. Letters that are not ASCII keep all their bytes inside of
words; other characters that are not ASCII become blanks, so that a table of 256 says which bytes
belong to words.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mtcli.core.curate.documents import Document
from mtcli.core.curate.hashing import Array, token_hashes, unaligned

BATCH_BYTES = 1 << 19  # of text: its arrays fit in a core's cache
BATCH_DOCUMENTS = 4096
ASCII = bytes(range(128))
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
WORD_BYTES = frozenset(LETTERS + b"0123456789_") | frozenset(range(128, 256))
BLANKS = frozenset(b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\0")  # they divide what rules call words
IN_WORD = bytes(byte in WORD_BYTES for byte in range(256))


class Drop(NamedTuple):
    """The reason why a document is dropped, with details for the report."""

    stage: str
    reason: str
    detail: dict[str, object]


class Tokens(NamedTuple):
    """Tokens of a batch, as byte ranges of `Batch.lowered` in order; every array but `bounds` is
    [tokens]."""

    starts: Array
    stops: Array
    owners: Array  # the document of each
    bounds: Array  # [documents + 1]: those of document i are bounds[i] .. bounds[i + 1]

    @property
    def counts(self) -> Array:
        """Counts the elements of each document [documents]."""
        return np.diff(self.bounds)


class Batch:
    """Documents that go through the stages together, and the dropped ones by index."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.drops: dict[int, Drop] = {}

    def drop(self, index: int, stage: str, reason: str, **detail: object) -> None:
        """Drops a document; the first reason counts."""
        self.drops.setdefault(int(index), Drop(stage, reason, detail))

    def alive(self) -> list[int]:
        """Returns the indices of the documents that no stage has dropped."""
        everyone = range(len(self.documents))
        return (
            [index for index in everyone if index not in self.drops] if self.drops else [*everyone]
        )

    def changed(self) -> None:
        """Clears the cached arrays after a stage has changed texts."""
        for name in ("lowered", "words", "word_hashes"):
            self.__dict__.pop(name, None)

    @cached_property
    def lowered(self) -> tuple[bytes, Array]:
        """The lower-case UTF-8 of all texts as one buffer, and the offset of each text [documents +
        1].

        A blank stands before each text and after the last.
        """
        parts = [lower(document.text) for document in self.documents]
        offsets = np.ones(len(parts) + 1, np.int64)
        np.cumsum([len(part) + 1 for part in parts], out=offsets[1:])
        offsets[1:] += 1
        return b" " + b" ".join(parts) + bytes(64), offsets

    @cached_property
    def words(self) -> Tokens:
        """Runs of letters, digits and underscores in the lower-case text, as \\w+ finds them."""
        data, offsets = self.lowered
        inside = np.frombuffer(data.translate(IN_WORD), np.uint8)
        edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
        starts, stops = edges[::2], edges[1::2]
        bounds = np.searchsorted(starts, offsets)
        owners = np.repeat(np.arange(len(self.documents)), np.diff(bounds))
        return Tokens(starts, stops, owners, bounds)

    @cached_property
    def word_hashes(self) -> Array:
        """The hash of each of `words` [words]."""
        return self.hashes_of(self.words)

    def hashes_of(self, tokens: Tokens) -> Array:
        """Returns the hash of each token [tokens]."""
        data, offsets = self.lowered
        view = unaligned(data, len(data) - 8)
        return token_hashes(view, tokens.starts, tokens.stops - tokens.starts)


def batches(documents: Iterable[Document]) -> Iterator[Batch]:
    """Divides documents into batches; the last may be empty, and its arrays have their shapes."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size + len(document.html or b"")
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield Batch(batch)
            batch, size = [], 0
    yield Batch(batch)


def lower(text: str) -> bytes:
    """Lower-cases a text into UTF-8, with a blank for each character that is neither ASCII nor
    alphanumeric.

    The result has as many characters as the text.
    """
    data = text.encode("utf-8", "surrogatepass")
    if text.isascii():
        return data.lower()
    non_ascii = not_ascii(data)
    if non_ascii != non_ascii.lower():  # else only ASCII changes, and C does that to bytes
        lowered = text.lower()
        if len(lowered) != len(text):  # a letter whose small form is two
            lowered = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
        data = lowered.encode("utf-8", "surrogatepass")
        non_ascii = not_ascii(data)
    data = data.lower()
    for character in set(non_ascii):
        if not character.isalnum():
            data = data.replace(character.encode("utf-8", "surrogatepass"), b" ")
    return data


def not_ascii(data: bytes) -> str:
    """Returns the characters of a UTF-8 text that are not ASCII, in order."""
    return data.translate(None, ASCII).decode("utf-8", "surrogatepass")
