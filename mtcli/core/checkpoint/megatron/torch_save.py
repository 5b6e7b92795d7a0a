"""Reads files of torch.save as data: zip archives of one pickle and of tensors' bytes.

The standard library's unpickler in Python runs the opcodes of PLAIN, and no others. It imports no
class and calls nothing: an allowed name becomes a `NamedClass`, an object built with it a
`PickledObject` of its arguments and state, and any other name is an error. `pickle.Unpickler`, in
C, has no such list: with a closed `find_class`, 9 bytes still make it write 4 GB of memo, and a key
of nested tuples crashes the process.

For a tensor only the offset of its bytes is found, so that parts can be read later. Sizes and
offsets are checked against the file.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, TypeVar

from mtcli.core.checkpoint.safetensors_file import CODE_BYTES, MAX_DIMS, TensorEntry, damaged
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import open_untrusted

Kind = TypeVar("Kind")
Allowed = Callable[[str], bool]  # whether a global of a name such as "torch.Size" may occur

# The opcodes of data since protocol 2, by their names in the pickle module. Not among them are
# BYTEARRAY8, which takes memory for the length that it says; DICT, whose keys are hashed; and PUT
# in text, whose places in the memo could be chosen to collide.
PLAIN = [
    *("PROTO", "MARK", "POP", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "BINPERSID"),
]
BROKEN = (
    *(pickle.UnpicklingError, EOFError, struct.error, ValueError),
    *(IndexError, TypeError, OverflowError, AttributeError),
)
LARGE = 2**32  # integer keys of this size could be chosen to collide
MAX_PICKLE_BYTES = 64 << 20
LOCAL_HEADER_BYTES = 30
STORAGES = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
REBUILD = "torch._utils._rebuild_tensor_v2"
OF_TENSORS = {*STORAGES, REBUILD, "collections.OrderedDict"}


class NamedClass(NamedTuple):
    """A class or function, by its name alone."""

    name: str


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object of a pickle: its class, its arguments, and the state set afterwards."""

    name: str
    arguments: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """appended to it, or (key, value) pairs set in it"""

    def get(self, name: str) -> Any:
        """Returns a field of the state; None where there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def append(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append(Pair(key, value))


class Pair(NamedTuple):
    """A dictionary's key that is no plain value, with its value."""

    key: Any
    value: Any


def read_pickle(data: bytes, path: Path, allowed: Allowed) -> Any:
    """Reads the value of a pickle; classes of an allowed name become `NamedClass`, and their
    objects `PickledObject`.

    Keys of dictionaries that are not text, bytes or numbers are found by `pairs_of` alone. Raises
    MtcliError that names the file for any other name, and for a pickle that is damaged or holds
    more than data.
    """
    try:
        return _RecordUnpickler(data, path, allowed).load()
    except KeyError as error:  # of `dispatch`: a place in the memo that is empty is another error
        opcode = f"the opcode {error.args[0]:#04x}"
        raise damaged(path, f"its pickle has {opcode}, which no data needs") from None
    except BROKEN as error:
        raise damaged(path, f"its pickle cannot be read ({type(error).__name__})") from None
    except (MemoryError, RecursionError):
        raise damaged(path, "its pickle takes too much memory") from None


def _code(name: str) -> int:
    """Returns the byte of an opcode."""
    return int(getattr(pickle, name)[0])


class _RecordUnpickler(pickle._Unpickler):
    """The standard library's unpickler, which makes records instead of objects and calls."""

    def __init__(self, data: bytes, path: Path, allowed: Allowed) -> None:
        file = io.BytesIO(data)
        super().__init__(file)
        self.path, self.allowed = path, allowed
        self.read, self.readline = file.read, file.readline
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append

    def load(self) -> Any:
        """Runs the opcodes up to the value, without the library's frames."""
        read, dispatch = self.read, self.dispatch
        while (opcode := read(1)) != pickle.STOP:
            dispatch[opcode[0]](self)
        (value,) = self.stack
        return value

    def find_class(self, module: str, name: str) -> NamedClass:
        full = f"{module}.{name}"
        if not self.allowed(full):
            message = f"{self.path} holds a pickle that names {full[:80]!r}, which no data needs"
            raise wrong(message, "it is not loaded; is the checkpoint from somebody you trust?")
        return NamedClass(full)

    def persistent_load(self, pid: Any) -> PickledObject:
        return PickledObject("persistent", pid)

    def _table(self) -> None:
        self.stack.append(_Table())

    def _record(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = PickledObject(_of(NamedClass, self.stack[-1]).name, arguments)

    def _build(self) -> None:
        state = self.stack.pop()
        _of(PickledObject, self.stack[-1]).state = state

    dispatch: ClassVar[dict[int, Any]] = {
        **{_code(name): pickle._Unpickler.dispatch[_code(name)] for name in PLAIN},
        _code("FRAME"): lambda unpickler: unpickler.read(8),
        _code("EMPTY_DICT"): _table,
        _code("EMPTY_SET"): pickle._Unpickler.dispatch[_code("EMPTY_LIST")],
        _code("ADDITEMS"): pickle._Unpickler.dispatch[_code("APPENDS")],
        _code("REDUCE"): _record,
        _code("NEWOBJ"): _record,
        _code("BUILD"): _build,
    }


class _Table(dict[Any, Any]):
    """A dictionary that hashes no key whose hash could be slow, or collide on purpose."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        is_small = isinstance(key, int) and abs(key) < LARGE
        is_plain = is_small or isinstance(key, str | bytes | None)
        super().__setitem__(key if is_plain else _Key(key), value)


class _Key(NamedTuple):
    """A dictionary's key that is compared by identity."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.value is other.value


def pairs_of(value: Any) -> list[Pair]:
    """Returns the pairs of a dictionary that was read."""
    return [Pair(k.value if isinstance(k, _Key) else k, v) for k, v in _of(dict, value).items()]


def _of(kind: type[Kind], value: Any) -> Kind:
    """Returns the value. Raises TypeError where it is of another kind."""
    if not isinstance(value, kind):
        raise TypeError
    return value


class ByteRange(NamedTuple):
    """The bytes offset .. offset + length of a file, which hold an archive."""

    path: Path
    offset: int
    length: int


def read_object(span: ByteRange, allowed: Allowed) -> Any:
    """Reads the pickle of an archive as data. Raises MtcliError where it is more than that."""
    with open_untrusted(span.path) as file:
        archive = _archive(file, span)
        return _pickle(archive, span, allowed, MAX_PICKLE_BYTES)


def find_tensor(file: IO[bytes], span: ByteRange) -> TensorEntry:
    """Locates the elements of an archive's only tensor in the open file.

    Raises MtcliError where the archive holds anything else, or a tensor that is not C-ordered.
    """
    archive = _archive(file, span)
    record = _pickle(archive, span, OF_TENSORS.__contains__, 1 << 16)
    match record:
        case PickledObject(
            name, (PickledObject("persistent", storage), int(first), tuple(shape), strides, *_)
        ):
            pass
        case _:
            raise damaged(span.path, f"the archive at byte {span.offset} is not one tensor")
    if name != REBUILD or not _is_counts(shape) or strides != _c_strides(shape) or first < 0:
        raise damaged(span.path, f"the tensor at byte {span.offset} is not in C order")
    match storage:
        case ("storage", NamedClass(kind), str(key), str(), int()) if kind in STORAGES:
            code = STORAGES[kind]
        case _:
            raise damaged(span.path, f"the storage at byte {span.offset} is of an unknown kind")
    at, size = _content(archive, span, file, f"data/{key}")
    skipped, needed = first * CODE_BYTES[code], prod(shape) * CODE_BYTES[code]
    if skipped + needed > size:
        raise damaged(span.path, f"the tensor at byte {span.offset} has {size} bytes of {needed}")
    return TensorEntry(code, shape, at + skipped, needed)


def _archive(file: IO[bytes], span: ByteRange) -> zipfile.ZipFile:
    end = file.seek(0, io.SEEK_END)
    if min(span.offset, span.length) < 0 or span.offset + span.length > end:
        raise damaged(span.path, f"its {end} bytes do not hold an archive at {span.offset}")
    try:
        return zipfile.ZipFile(io.BufferedReader(_Window(file, span)))
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, EOFError):
        message = f"at byte {span.offset} there is no archive of torch.save"
        raise damaged(span.path, message) from None


def _pickle(archive: zipfile.ZipFile, span: ByteRange, allowed: Allowed, most: int) -> Any:
    info = _info(archive, span, "data.pkl")
    if info.file_size > most:
        raise damaged(span.path, f"its pickle has {info.file_size} bytes, more than {most}")
    try:
        data = archive.read(info)
    except (zipfile.BadZipFile, ValueError, OSError, RuntimeError, EOFError):
        raise damaged(span.path, "its pickle cannot be read") from None
    return read_pickle(data, span.path, allowed)


def _info(archive: zipfile.ZipFile, span: ByteRange, name: str) -> zipfile.ZipInfo:
    for info in archive.infolist():
        if info.filename.partition("/")[2] == name:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise damaged(span.path, f"{info.filename} is compressed, which torch never does")
            return info
    raise damaged(span.path, f"the archive at byte {span.offset} has no {name}")


def _content(
    archive: zipfile.ZipFile, span: ByteRange, file: IO[bytes], name: str
) -> tuple[int, int]:
    """Returns (offset in the file, size) of a member's content."""
    info = _info(archive, span, name)
    file.seek(span.offset + info.header_offset)
    header = file.read(LOCAL_HEADER_BYTES)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    at = info.header_offset + LOCAL_HEADER_BYTES + lengths
    if not header.startswith(b"PK\x03\x04") or at + info.file_size > span.length:
        raise damaged(span.path, f"{name} at byte {span.offset} is not where its archive says")
    return span.offset + at, info.file_size


class _Window(io.RawIOBase):
    """The bytes of a span, as a file object."""

    def __init__(self, file: IO[bytes], span: ByteRange) -> None:
        self.file, self.span, self.at = file, span, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.span.length}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self.at = base + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.span.offset + self.at)
        data = self.file.read(max(0, min(len(buffer), self.span.length - self.at)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _is_counts(shape: tuple[Any, ...]) -> bool:
    counts = all(type(size) is int and 0 < size < 2**48 for size in shape)
    return counts and len(shape) <= MAX_DIMS
