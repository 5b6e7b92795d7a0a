"""Reads the header of a GGUF file, which is checked as untrusted, and describes the file.

A header is the magic, uint32 version, uint64 numbers of tensors and of facts; facts, each a name,
a uint32 kind and a value; and of each tensor its name, uint32 number of dims, uint64 dims from the
innermost, uint32 type and uint64 offset behind the header, aligned. The package's own reader is not
used: it follows any length, and loops 2**64 times over an array that is none. Its tables are.
"""

import os
import struct
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import open_untrusted, shown
from mtcli.core.convert.gguf.write import MAGIC, require_package

VERSIONS = (2, 3)
# struct's letters of the kinds of facts, by GGUF's numbers; 8 is a text and 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
SCALARS |= {12: "d"}
TEXT, ARRAY = 8, 9
LETTERS = {TEXT: "Q"} | SCALARS  # of a text, its length comes first
MAX_TENSORS, MAX_FACTS, MAX_DIMS = 200_000, 10_000, 4
MAX_NAME_BYTES = 1 << 16
MAX_TEXT_BYTES = 1 << 24  # a chat template has thousands
ALIGNMENT = "general.alignment"


class GgufEntry(NamedTuple):
    """A tensor of a file: its type, its shape from the outermost dim, its offset and bytes."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class GgufHeader(NamedTuple):
    """The facts of a file by name (of an array, its number of items), and its tensors."""

    facts: dict[str, int | float | str]
    tensors: dict[str, GgufEntry]
    bytes: int


def read_gguf(path: Path) -> GgufHeader:
    """Reads the header of a GGUF file.

    Raises MtcliError where the file is damaged, or none of little-endian GGUF 2 and 3.
    """
    try:
        with open_untrusted(path) as file:
            return _Reader(file, path).header()
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "name a GGUF file") from None


def describe_gguf(path: Path) -> dict[str, Any]:
    """Lists architecture, facts, sizes and tensors of a GGUF file, by type too."""
    facts, tensors, size = read_gguf(path)
    types: dict[str, dict[str, int]] = {}
    for entry in tensors.values():
        count = types.setdefault(entry.kind, {"tensors": 0, "bytes": 0})
        count["tensors"] += 1
        count["bytes"] += entry.bytes
    return {
        "path": str(path),
        "format": "gguf",
        "architecture": facts.get("general.architecture"),
        "name": facts.get("general.name"),
        "parameters": sum(prod(entry.shape) for entry in tensors.values()),
        "bytes": sum(entry.bytes for entry in tensors.values()),
        "file_bytes": size,
        "types": dict(sorted(types.items())),
        "facts": facts,
        "tensors": {
            name: {"shape": list(entry.shape), "dtype": entry.kind, "bytes": entry.bytes}
            for name, entry in tensors.items()
        },
    }


class _Reader:
    """A file of `size` bytes, read from its beginning on."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file, self.path, self.size = file, path, os.fstat(file.fileno()).st_size

    def header(self) -> GgufHeader:
        if self.take(4) != MAGIC:
            raise self.wrong("it does not begin as a GGUF file does")
        (version,) = self.numbers("I")
        if version not in VERSIONS:
            raise self.wrong(
                f"it is of version {version}, and {VERSIONS} of little-endian are read"
            )
        num_tensors, num_facts = self.numbers("QQ")
        if num_tensors > MAX_TENSORS or num_facts > MAX_FACTS:
            counts = f"{num_tensors:,} tensors and {num_facts:,} facts"
            raise self.wrong(f"it has {counts}, and {MAX_TENSORS:,} and {MAX_FACTS:,} are the most")
        facts: dict[str, int | float | str] = {}
        for _ in range(num_facts):
            name = self.text(MAX_NAME_BYTES)
            if name in facts:
                raise self.wrong(f"it has two facts {shown(name)}")
            (kind,) = self.numbers("I")
            facts[name] = self.array() if kind == ARRAY else self.value(kind)
        infos = [self.info() for _ in range(num_tensors)]
        alignment = facts.get(ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.wrong(f"{ALIGNMENT} is {shown(alignment)}, and no power of 2")
        start = -(-self.file.tell() // alignment) * alignment
        tensors: dict[str, GgufEntry] = {}
        for name, entry in infos:
            if name in tensors:
                raise self.wrong(f"it has two tensors {shown(name)}")
            tensors[name] = entry._replace(offset=start + entry.offset)
            if (end := start + entry.offset + entry.bytes) > self.size:
                raise self.wrong(f"{shown(name)} ends at byte {end:,} of {self.size:,}")
        return GgufHeader(facts, tensors, self.size)

    def info(self) -> tuple[str, GgufEntry]:
        """Reads a tensor's name and entry, whose offset is behind the header."""
        gguf, name = require_package(), self.text(MAX_NAME_BYTES)
        (num_dims,) = self.numbers("I")
        if num_dims > MAX_DIMS:
            raise self.wrong(f"{shown(name)} has {num_dims} dims, and {MAX_DIMS} are the most")
        *dims, number, offset = self.numbers(f"{num_dims}QIQ")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise self.wrong(f"{shown(name)} is of type {number}, which is none") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if (width := dims[0] if dims else 1) % block:
            raise self.wrong(
                f"{shown(name)} has rows of {width}, and {kind.name} blocks of {block}"
            )
        size = prod(dims) // block * block_bytes
        return name, GgufEntry(kind.name, tuple(reversed(dims)), offset, size)

    def array(self) -> int:
        """Steps over an array; returns its number of items."""
        kind: int
        count: int
        kind, count = self.numbers("IQ")
        letter = LETTERS.get(kind)
        if letter is None:
            raise self.wrong(f"it has an array of kind {kind}, which is none of {tuple(LETTERS)}")
        if kind != TEXT:
            self.skip(count * struct.calcsize(f"<{letter}"))
            return count
        for _ in range(count):  # a text takes bytes, so the file's end is an end
            self.skip(*self.numbers("Q"))
        return count

    def value(self, kind: int) -> int | float | str:
        if kind == TEXT:
            return self.text(MAX_TEXT_BYTES)
        if kind not in SCALARS:
            raise self.wrong(f"it has a fact of kind {kind}, which is none of {tuple(LETTERS)}")
        value: int | float = self.numbers(SCALARS[kind])[0]
        return value

    def text(self, most: int) -> str:
        (length,) = self.numbers("Q")
        if length > most:
            raise self.wrong(f"it has a text of {length:,} bytes, and {most:,} are the most")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.wrong("it has a name or a text that is not UTF-8") from None

    def numbers(self, letters: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{letters}", self.take(struct.calcsize(f"<{letters}")))

    def skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise self.wrong(f"its header ends beyond its {self.size:,} bytes")
        self.file.seek(count, os.SEEK_CUR)

    def take(self, count: int) -> bytes:
        if len(data := self.file.read(count)) < count:
            raise self.wrong(f"its header ends beyond its {self.size:,} bytes")
        return data

    def wrong(self, why: str) -> MtcliError:
        return wrong(f"{self.path} is no sound GGUF file: {why}", "copy or write it again")
