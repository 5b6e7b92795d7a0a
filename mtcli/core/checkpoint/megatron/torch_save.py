"""Reads files of torch.save as data: zip archives of one pickle and of tensors' bytes.

Nothing is unpickled. The opcodes come from the standard library's disassembler, which executes
none: a class or function of an allowed name becomes a `NamedClass`, and what is built with it a
`PickledObject` of its arguments and state; any other name is an error, as is all that is not plain
data. Of a tensor only the offset of its bytes is found, so that they are read later and in part.
Sizes and offsets are checked against the file.
"""

import io
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from mtcli.core.checkpoint.safetensors_file import CODE_BYTES, TensorEntry, damaged
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import open_untrusted

Kind = TypeVar("Kind")
Allowed = Callable[[str], bool]  # whether a global of a name such as "torch.Size" may occur

NUMBERS_AND_TEXT = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"),
    *("BINBYTES8", "BYTEARRAY8", "BINSTRING", "SHORT_BINSTRING", "STRING"),
}
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


@dataclass(eq=False)
class PickledObject:
    """An object that a pickle would make: its class, its arguments, and the state set after."""

    name: str
    arguments: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """appended to it, or (key, value) pairs set in it"""

    def get(self, name: str) -> Any:
        """A field of its state; None where there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Pair(NamedTuple):
    """A key that is no plain value, with its value."""

    key: Any
    value: Any


class Mark:
    """A mark on the stack, where a list of operands begins."""


def read_pickle(data: bytes, path: Path, allowed: Allowed) -> Any:
    """Reads the value of a pickle; classes of an allowed name are `NamedClass`, and what is made of
    them `PickledObject`.

    Dictionaries whose keys are not all plain become lists of `Pair`s. Raises MtcliError that names
    the file for any other name, and for a pickle that is damaged or holds more than data.
    """
    try:
        return _Decoder(path, allowed).run(data)
    except MtcliError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise damaged(path, f"its pickle cannot be read ({type(error).__name__})") from None
    except (MemoryError, RecursionError):
        raise damaged(path, "its pickle takes too much memory") from None


class _Decoder:
    """A stack machine whose only effects are on its own stack and memo."""

    def __init__(self, path: Path, allowed: Allowed) -> None:
        self.path, self.allowed = path, allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            handler = HANDLERS.get(opcode.name)
            if handler is None:
                raise damaged(self.path, f"its pickle has {opcode.name}, which no data needs")
            handler(self, argument)
        (value,) = self.stack
        return value

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        if any(isinstance(value, Mark) for value in taken):
            raise ValueError
        return taken

    def _since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while not isinstance(self.stack[at], Mark):
            at -= 1
            if at < 0:
                raise IndexError
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken

    def _append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        (target.items if isinstance(target, PickledObject) else _of(list, target)).extend(values)

    def _set(self, values: list[Any]) -> None:
        pairs = [Pair(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
        target = self.stack[-1]
        if isinstance(target, PickledObject):
            target.items.extend(pairs)
            return
        for key, value in pairs:
            _of(dict, target)[key if _is_plain(key) else _Key(key)] = value

    def _global(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}"
        if not isinstance(module, str) or not isinstance(name, str) or not self.allowed(full):
            message = f"{self.path} holds a pickle that names {full[:80]!r}, which no data needs"
            raise wrong(message, "it is not loaded; is the checkpoint from somebody you trust?")
        self.stack.append(NamedClass(full))

    def _reduce(self, _: Any) -> None:
        function, arguments = self._pop(2)
        self.stack.append(PickledObject(_of(NamedClass, function).name, arguments))

    def _build(self, _: Any) -> None:
        (state,) = self._pop(1)
        _of(PickledObject, self.stack[-1]).state = state

    def _persistent(self, _: Any) -> None:
        (key,) = self._pop(1)
        self.stack.append(PickledObject("persistent", key))

    def _remember(self, index: Any) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]


class _Key(NamedTuple):
    """A dictionary's key that is not plain, compared by identity: hashing could recurse."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.value is other.value


def _push(make: Callable[["_Decoder", Any], Any]) -> Callable[["_Decoder", Any], None]:
    return lambda decoder, argument: decoder.stack.append(make(decoder, argument))


HANDLERS: dict[str, Callable[[_Decoder, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda d, _: None),
    **dict.fromkeys(NUMBERS_AND_TEXT, _push(lambda _, value: value)),
    "NONE": _push(lambda *_: None),
    "NEWTRUE": _push(lambda *_: True),
    "NEWFALSE": _push(lambda *_: False),
    "EMPTY_LIST": _push(lambda *_: []),
    "EMPTY_DICT": _push(lambda *_: {}),
    "EMPTY_TUPLE": _push(lambda *_: ()),
    "EMPTY_SET": _push(lambda *_: []),
    "MARK": _push(lambda *_: Mark()),
    "TUPLE": _push(lambda d, _: tuple(d._since_mark())),
    "TUPLE1": _push(lambda d, _: tuple(d._pop(1))),
    "TUPLE2": _push(lambda d, _: tuple(d._pop(2))),
    "TUPLE3": _push(lambda d, _: tuple(d._pop(3))),
    "LIST": _push(lambda d, _: d._since_mark()),
    "APPEND": lambda d, _: d._append(d._pop(1)),
    "APPENDS": lambda d, _: d._append(d._since_mark()),
    "ADDITEMS": lambda d, _: d._append(d._since_mark()),
    "SETITEM": lambda d, _: d._set(d._pop(2)),
    "SETITEMS": lambda d, _: d._set(d._since_mark()),
    "GLOBAL": lambda d, text: d._global(*text.split(" ", 1)),
    "STACK_GLOBAL": lambda d, _: d._global(*d._pop(2)),
    "REDUCE": _Decoder._reduce,
    "NEWOBJ": _Decoder._reduce,
    "BUILD": _Decoder._build,
    "BINPERSID": _Decoder._persistent,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Decoder._remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _push(lambda d, index: d.memo[index])),
    "POP": lambda d, _: d._pop(1) and None,
}


def pairs_of(value: Any) -> list[Pair]:
    """The pairs of a dictionary that was read."""
    return [Pair(k.value if isinstance(k, _Key) else k, v) for k, v in _of(dict, value).items()]


def _is_plain(key: Any) -> bool:
    return isinstance(key, str | bytes | int | float | None)


def _of(kind: type[Kind], value: Any) -> Kind:
    """The value. Raises TypeError where it is of another kind."""
    if not isinstance(value, kind):
        raise TypeError
    return value


class ByteRange(NamedTuple):
    """Bytes offset .. offset + length of a file, which are an archive."""

    path: Path
    offset: int
    length: int


def read_object(span: ByteRange, allowed: Allowed) -> Any:
    """Reads the pickle of an archive as data; raises MtcliError where it is more than that."""
    with open_untrusted(span.path) as file:
        archive = _archive(file, span)
        return _pickle(archive, span, allowed, MAX_PICKLE_BYTES)


def find_tensor(file: IO[bytes], span: ByteRange) -> TensorEntry:
    """Finds the elements of the one tensor of an archive in its file, which is open.

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
    """(byte of the file, size) of a member's content."""
    info = _info(archive, span, name)
    file.seek(span.offset + info.header_offset)
    header = file.read(LOCAL_HEADER_BYTES)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    at = info.header_offset + LOCAL_HEADER_BYTES + lengths
    if not header.startswith(b"PK\x03\x04") or at + info.file_size > span.length:
        raise damaged(span.path, f"{name} at byte {span.offset} is not where its archive says")
    return span.offset + at, info.file_size


class _Window(io.RawIOBase):
    """The bytes of a span as a file of their own."""

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
    return all(type(size) is int and 0 < size < 2**48 for size in shape)
