"""The safetensors file format: a header that is checked as untrusted, and boxes read from it.

A file is a little-endian uint64 header length, a JSON header of name -> {dtype, shape,
data_offsets}, and the tensors' bytes, which tile the rest of the file without holes. Nothing in a
file is executed. Every failure is an MtcliError that names the file.

Files that stay open between reads: the kernel reads ahead in an open file, and forgets where it
was in one that is closed. A checkpoint of 16 MiB tensors loads a fifth faster.
"""

import json
from collections import OrderedDict
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.checkpoint.dtype_names import CODE_BYTES
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import is_text, open_untrusted, shown

MAX_HEADER_BYTES = 100_000_000  # as in the reference reader
MAX_DIMS = 16
MAX_NUMEL = 2**59  # 64-bit arithmetic on bytes holds it, whatever the dtype


class TensorEntry(NamedTuple):
    """One tensor of a file: its dtype's code, its shape, and where its bytes are in the file."""

    code: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class PlannedTensor(NamedTuple):
    """A tensor of a file to be written: its name, its dtype's code and its shape."""

    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in a file."""
        return prod(self.shape) * CODE_BYTES[self.code]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name.

    Raises MtcliError where the file is missing or its header does not describe it exactly.
    """
    try:
        with open_untrusted(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise damaged(path, f"its header of {length} bytes is not in its {size} bytes")
            text = file.read(length)
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "is the folder complete?") from None
    return _entries(path, _json_object(path, text), 8 + length, size)


def encode_header(
    tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """The first bytes of a file of tensors, in that order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, code, shape in tensors:
        end = at + prod(shape) * CODE_BYTES[code]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that tensors start at a multiple of their item size
    return len(text).to_bytes(8, "little") + text


def damaged(path: Path, what: str) -> MtcliError:
    """The error for a file that is not what it should be."""
    return wrong(f"{path} is damaged: {what}", "use another copy or an earlier checkpoint")


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise damaged(path, "its header is not a JSON object")
    return header


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _entries(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, TensorEntry]:
    about = header.pop("__metadata__", None) or {}
    if not isinstance(about, dict) or not all(map(is_text, (*about, *about.values()))):
        raise damaged(path, "its __metadata__ is not a table of text")
    entries = {name: _entry(path, name, value, start) for name, value in header.items()}
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if entry.offset != end:
            raise damaged(path, f"{name} starts at byte {entry.offset} and not at {end}")
        end += entry.bytes
    if end != size:
        raise damaged(path, f"it has {size} bytes and its tensors end at {end}")
    return entries


def _entry(path: Path, name: str, value: Any, start: int) -> TensorEntry:
    if not is_text(name):
        raise damaged(path, f"the name {shown(name)} is no text")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"the header entry of {name} is not a dtype, shape and data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in CODE_BYTES:
        raise damaged(path, f"{name} has the unknown dtype {shown(code)}")
    if not _is_counts(shape) or len(shape) > MAX_DIMS or prod(n or 1 for n in shape) > MAX_NUMEL:
        raise damaged(path, f"{name} has the shape {shown(shape)}")
    if not _is_counts(offsets) or len(offsets) != 2:
        raise damaged(path, f"{name} has the data_offsets {shown(offsets)}")
    begin, end = offsets
    expected = prod(shape) * CODE_BYTES[code]
    if end - begin != expected:
        raise damaged(path, f"{name} has {end - begin} bytes and its shape takes {expected}")
    return TensorEntry(code, tuple(shape), start + begin, expected)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


# Far from a process's limit, and more than the files that hold one tensor's pieces.
MAX_OPEN = 32


def open_file(path: Path) -> FileIO:
    """A file to read at any place. Raises MtcliError where it cannot be opened."""
    try:
        return open_untrusted(path, 0)
    except OSError as error:
        raise damaged(path, f"it cannot be opened ({error.strerror})") from None


class OpenFiles:
    """The files that were read last, at most MAX_OPEN of them, closed with this object."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, FileIO] = OrderedDict()

    def get(self, path: Path) -> FileIO:
        """A file, opened unless it still is. Raises MtcliError where it cannot be."""
        if path not in self._files:
            self._files[path] = open_file(path)
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(path)
        return self._files[path]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OpenFiles, ()  # another process opens its own

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()
