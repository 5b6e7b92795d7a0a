"""Reads the safetensors format: a header that is checked as untrusted, and boxes of tensors.

A file is a little-endian uint64 header length, a JSON header of name -> {dtype, shape,
data_offsets}, and the tensors' bytes, which tile the rest of the file. Nothing in a file is
executed. Every failure is an MtcliError that names the file.

The safetensors library is not used: it has no offsets for range reads, writes no block before it
has every tensor, waits for a named pipe, and accepts duplicate names and shapes that overflow
int64.

The table of dtypes that checkpoints support is here too, without torch: our names, those of flags
and the codes of the header.
"""

import json
import os
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import is_text, open_untrusted, shown
from mtcli.core.mesh.sharding import Box

OF_DAMAGE = "use another copy or an earlier checkpoint"  # the hint of a damaged file
MAX_HEADER_BYTES = 100_000_000  # as in the reference reader
READ_BYTES = 1 << 16  # at first: the header of a rank's file, and of few of other tools a part
MAX_TENSORS = 200_000  # of a file, whose header is parsed in seconds; DeepSeek-V3 has 92,000 in all
MAX_DIMS = 16
MAX_NUMEL = 2**59  # 64-bit arithmetic on bytes holds it, whatever the dtype

# Sizes in bytes of every code that a safetensors header may name. Tensors of the codes of CODES can
# be read, the others only stepped over (GPT-2's boolean masks, say).
CODE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

Planned = tuple[str, str, tuple[int, ...]]  # a tensor to be written: its name, code and shape


def parse_dtype(text: str) -> str:
    """Returns our name of a dtype such as "bf16" or "bfloat16", as flags give it.

    Raises MtcliError that lists the names.
    """
    name = SHORT.get(text, text)
    if name not in CODES:
        hint = f"one of {', '.join(SHORT)}; with --to gguf also q8_0"
        raise wrong(f"there is no dtype {text!r}", hint, "--dtype")
    return name


class TensorEntry(NamedTuple):
    """A tensor of a file: its dtype's code, its shape, and its byte offset in the file."""

    code: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class StoredBox(NamedTuple):
    """A tensor of a file as a box of a global tensor.

    The elements of the tensor `key` of `shape` from number `first` on are viewed as shape `view`;
    dimension d of the box, which starts at `start`, is dimension axes[d] of the view. A Hugging
    Face family sets keys, and leaves `file` and the dtype's `code` to the folder. `replica` is the
    data-parallel replica that has these elements, or None where all have them.
    """

    key: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    axes: tuple[int, ...]
    start: tuple[int, ...]
    file: str = ""
    code: str = ""
    replica: int | None = None
    first: int = 0

    @classmethod
    def plain(
        cls, file: str, key: str, code: str, box: Box, replica: int | None = None
    ) -> "StoredBox":
        """Builds a stored box whose tensor has the box's dimensions, in order."""
        start, size = box
        return cls(key, size, size, tuple(range(len(size))), start, file, code, replica)

    @property
    def box(self) -> Box:
        """The box of the global tensor."""
        return self.box_of(Box.of(self.view))

    @property
    def order(self) -> list[int]:
        """The permutation of the box's dimensions that gives the view's."""
        return [self.axes.index(axis) for axis in range(len(self.axes))]

    def box_of(self, part: Box) -> Box:
        """Maps a box of the view to a box of the global tensor."""
        start, size = (tuple(numbers[axis] for axis in self.axes) for numbers in part)
        return Box(start, size).moved(self.start)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Reads the tensors of a safetensors file by name.

    Raises MtcliError where the file is missing or its header does not describe it exactly.
    """
    try:
        with open_untrusted(path, 0) as file:
            return header_of(file)
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "is the folder complete?") from None


def read_metadata(path: Path) -> dict[str, str]:
    """Reads the table of texts in a safetensors file's header; see `read_header`."""
    with open_untrusted(path, 0) as file:
        return _metadata(path, _table_of(file)[0])


def header_of(file: IO[bytes]) -> dict[str, TensorEntry]:
    """Reads the header of an open file (`read_header`), in one read where it is short."""
    path = Path(file.name)
    return _entries(path, *_table_of(file))


def _table_of(file: IO[bytes]) -> tuple[dict[str, Any], int, int]:
    """Returns (header, where the tensors start, bytes) of an open file."""
    path, size = Path(file.name), os.fstat(file.fileno()).st_size
    text = os.pread(file.fileno(), READ_BYTES, 0)
    length = int.from_bytes(text[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise damaged(path, f"its header of {length} bytes is not in its {size} bytes")
    while len(text) < 8 + length and (more := os.pread(file.fileno(), 8 + length, len(text))):
        text += more
    if (tensors := text.count(b'"data_offsets"')) > MAX_TENSORS:
        raise damaged(path, f"its header has {tensors} tensors, and {MAX_TENSORS} are the most")
    return _json_object(path, text[8 : 8 + length]), 8 + length, size


def encode_header(tensors: list[Planned], metadata: dict[str, str]) -> bytes:
    """Encodes the header of a file of tensors, in that order."""
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
    """Builds the error of a damaged file."""
    return wrong(f"{path} is damaged: {what}", OF_DAMAGE)


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


def _metadata(path: Path, header: dict[str, Any]) -> dict[str, str]:
    """Takes the table of texts from a header."""
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(map(is_text, (*metadata, *metadata.values()))):
        raise damaged(path, "its __metadata__ is not a table of text")
    return metadata


def _entries(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, TensorEntry]:
    _metadata(path, header)
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
