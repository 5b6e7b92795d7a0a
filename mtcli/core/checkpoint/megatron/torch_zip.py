"""Files of torch.save read as data: zip archives of one pickle and of tensors' bytes.

The pickle is read by `pickles.py`, which calls nothing; of a tensor's bytes only their place is
found, so that they are read later and in part. Sizes and places are checked against the file.
"""

import io
import zipfile
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from mtcli.core.checkpoint.dtype_names import CODE_BYTES
from mtcli.core.checkpoint.megatron.pickles import (
    Allowed,
    NamedClass,
    PickledObject,
    read_pickle,
)
from mtcli.core.checkpoint.safetensors_file import TensorEntry, damaged
from mtcli.core.config.untrusted import open_untrusted

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


class ByteRange(NamedTuple):
    """Where an archive is: bytes offset .. offset + length of a file."""

    path: Path
    offset: int
    length: int


def read_object(span: ByteRange, allowed: Allowed) -> Any:
    """The pickle of an archive, as records; raises MtcliError where it is not plain data."""
    with open_untrusted(span.path) as file:
        archive = _archive(file, span)
        return _pickle(archive, span, allowed, MAX_PICKLE_BYTES)


def find_tensor(file: IO[bytes], span: ByteRange) -> TensorEntry:
    """Where the elements of the one tensor of an archive are in its file, which is open.

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
    at, size = _place(archive, span, file, f"data/{key}")
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


def _place(
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

    def tell(self) -> int:
        return self.at

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
