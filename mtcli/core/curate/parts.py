"""Writes and reads parts: the files that a worker makes of a block, which appear together or not at
all.

A part holds documents as the JSON lines that shards are made of, and arrays that are read without
the text: line ends, keys, and the features of corpus stages. Row i of every array is document i.
"""

import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from math import isfinite, isinf, prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mtcli.core.config.untrusted import open_untrusted, parse_json
from mtcli.core.curate.documents import Document, id_of
from mtcli.core.curate.hashing import Array
from mtcli.core.runtime.atomic_writes import sync_folder

SUMMARY = "summary.json"
BY_COLUMN = {"bands"}  # arrays that are read a column at a time, and so written as their transpose
ENCODE = json.JSONEncoder(ensure_ascii=False, default=str).encode
LINES, REMOVED = "documents.jsonl", "removed.jsonl"


class PartWriter:
    """Writes a part into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines = (folder / LINES).open("wb")
        self._removed = (folder / REMOVED).open("wb")
        self._keys: list[bytes] = []
        self._lengths: list[int] = []
        self._sizes: list[int] = []
        self._sources: dict[str, int] = {}
        self._source_of: list[int] = []
        self._arrays: dict[str, list[Array]] = {}

    def add(self, documents: Sequence[Document]) -> int:
        """Adds documents; returns the row of the first one."""
        first, source_numbers = len(self._keys), self._sources
        lines = [line_of(document) for document in documents]
        self._lines.write(b"".join(lines))
        self._lengths += map(len, lines)
        self._keys += [document.key for document in documents]
        self._sizes += [document.size for document in documents]
        self._source_of += [
            source_numbers.setdefault(document.source, len(source_numbers))
            for document in documents
        ]
        return first

    def add_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Adds rows to arrays by name."""
        for name, rows in arrays.items():
            self._arrays.setdefault(name, []).append(rows)

    def remove(self, removed: Mapping[str, object]) -> None:
        """Adds the record of a dropped document."""
        self._removed.write(json_line(removed))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Writes the arrays and the summary."""
        arrays = {name: np.concatenate(rows) for name, rows in self._arrays.items()}
        arrays["line_ends"] = np.cumsum(self._lengths, dtype=np.int64)
        arrays["sizes"] = np.array(self._sizes, np.int64)
        arrays["sources"] = np.array(self._source_of, np.int32)
        arrays["keys"] = np.frombuffer(b"".join(self._keys), np.uint8)
        arrays["key_ends"] = np.cumsum([len(key) for key in self._keys], dtype=np.int64)
        for name, array in arrays.items():
            stored = np.ascontiguousarray(array.T) if name in BY_COLUMN else array
            np.save(self._folder / f"{name}.npy", stored)
        facts = dict(summary) | {"documents": len(self._keys), "sources": list(self._sources)}
        (self._folder / SUMMARY).write_text(json.dumps(facts))
        for file in (self._lines, self._removed):
            file.close()


class Files(Protocol):
    """The files of a part, in a folder or in a cluster."""

    def array(self, name: str) -> Array:
        """Returns the array of a name."""

    def data(self, name: str) -> Any:
        """Returns the bytes of a file, as a buffer."""


class Folder:
    """The files of a part in a folder, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._headers: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}

    def array(self, name: str) -> Array:
        """Maps an array. Caches its header, as bands are mapped one by one."""
        path = f"{self.path}/{name}.npy"
        if name not in self._headers:
            with open_untrusted(path) as file:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                self._headers[name] = dtype, shape, file.tell()
        dtype, shape, offset = self._headers[name]
        if not prod(shape):
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", offset, shape)

    def data(self, name: str) -> Any:
        """Maps a file."""
        with open_untrusted(self.path / name) as file:
            empty = not os.fstat(file.fileno()).st_size
            return b"" if empty else mmap(file.fileno(), 0, access=ACCESS_READ)


class Part:
    """A part that was written, read on demand."""

    def __init__(self, files: Files, against: bool = False) -> None:
        self.files, self.against = files, against

    def __reduce__(self) -> tuple[type, tuple[Files, bool]]:
        return Part, (self.files, self.against)  # without what is mapped

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The counts of the worker that wrote it."""
        summary = parse_json(bytes(self.files.data(SUMMARY)))
        assert isinstance(summary, dict), "written by PartWriter"
        return summary

    def array(self, name: str) -> Array:
        """Returns an array of the part."""
        return self.files.array(name)

    @property
    def count(self) -> int:
        """The number of documents."""
        return int(self.summary["documents"])

    def keys(self) -> list[bytes]:
        """Returns the keys of all documents [documents]."""
        data, ends = self.array("keys").tobytes(), self.array("key_ends").tolist()
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def lines(self) -> "Lines":
        """The JSON lines of the documents, whose file is open as long as this object lives."""
        return Lines(self.files.data(LINES), self.array("line_ends"))

    def removed(self) -> Iterator[bytes]:
        """Yields the lines of documents that per-document stages dropped."""
        yield from io.BytesIO(self.files.data(REMOVED))


class Lines:
    """A file of lines, indexed by number."""

    def __init__(self, data: Any, ends: Array) -> None:
        self._ends, self._data = [0, *ends.tolist()], data  # a copy: no file of it stays open

    def __getitem__(self, row: int) -> bytes:
        return bytes(self._data[self._ends[row] : self._ends[row + 1]])

    def text(self, row: int) -> str:
        """Returns the text of a document."""
        return str(load_line(self[row])["text"])


def line_of(document: Document) -> bytes:
    """Encodes a document as a JSON line: id, text and source first, then its other fields."""
    head = {"id": id_of(document.key), "text": document.text, "source": document.source}
    if document.fields:
        head |= document.fields
    return json_line(head)


def document_of(line: bytes, key: bytes, size: int) -> Document:
    """Decodes a line that `line_of` wrote."""
    record = load_line(line)
    del record["id"]
    return Document(key, record.pop("source"), record.pop("text"), size, record)


def load_line(line: bytes | str) -> Any:
    """Parses a line of JSON, as json.loads would.

    Raises ValueError for invalid JSON, and for numbers that JSON cannot write again: NaN, Infinity,
    or one beyond float64.
    """
    import orjson

    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:  # half of a surrogate pair, NaN, deep lists, or no JSON
        return _strict_loads(line)
    if isinstance(record, dict):
        for value in record.values():
            if type(value) is not str and _is_rounded(value):
                return _strict_loads(line)
        return record
    return _strict_loads(line) if _is_rounded(record) else record


def _finite(number: str) -> float:
    if isinf(value := float(number)):
        raise ValueError(f"{number} is beyond float64")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_strict_loads = partial(json.loads, parse_float=_finite, parse_constant=_refuse)


def _is_rounded(value: object) -> bool:
    """Says whether a value may hold an integer of more than 64 bits, which orjson rounds."""
    if isinstance(value, float):
        return abs(value) >= 1 << 63
    if isinstance(value, dict):
        return any(map(_is_rounded, value.values()))
    return isinstance(value, list) and any(map(_is_rounded, value))


def is_finite(value: object) -> bool:
    """Says whether JSON can write a value: it has no NaN and no infinity."""
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(is_finite, value))


def json_page(record: Mapping[str, object]) -> str:
    """Encodes a record as JSON with one line per key; twenty times as fast as with an indent."""
    lines = (f"{json.dumps(key)}: {ENCODE(value)}" for key, value in record.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def json_line(record: Mapping[str, object]) -> bytes:
    """Encodes a record as a line of JSON in UTF-8; values without a JSON type become text."""
    import orjson  # of an extra

    try:
        return orjson.dumps(record, default=str, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # half of a surrogate pair in another key than the text, or a huge number
        return json.dumps(record, default=str, separators=(",", ":")).encode() + b"\n"


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, renamed to `folder` once its files are durable."""
    aside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    for path in aside.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    sync_folder(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.replace(folder)
