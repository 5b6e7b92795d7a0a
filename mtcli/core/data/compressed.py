"""Decompresses files in pieces of at most PIECE_BYTES, whatever their ratio.

Truncated files are errors, though the zstandard package's own reader accepts them; of several
streams or frames, all are read.
"""

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import open_untrusted

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
# What damage raises; and OSError, where it has no number of the system's.
DAMAGE = (EOFError, zlib.error, lzma.LZMAError)
PIECE_BYTES = 1 << 20
MAX_RATIO = 1000  # bytes out of a file for each of its own; gzip's limit is 1032
FREE_BYTES = 64 << 20  # out of any file: a ratio of few bytes says nothing
FED_BYTES = 1 << 16  # read of a compressed file at a time
MAX_XZ_BYTES = 256 << 20  # of a decoder's memory: `xz -9` asks for 65 MiB, a file may ask for 4 GiB
XZ_MAGIC = b"\xfd7zXZ\0"
ZST_BLOCK_BYTES = 128 << 10  # of a block, compressed or not
RLE, COMPRESSED = 1, 2  # kinds of blocks; one of RLE repeats one byte


def inner_name(path: Path) -> Path:
    """Returns the name without the suffix of its compression."""
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def require_ratio(path: str | Path, size: int, count: int) -> None:
    """Raises MtcliError where a file of `size` bytes gives more than MAX_RATIO times as many."""
    if count > max(FREE_BYTES, MAX_RATIO * size):
        raise wrong(
            f"{path} holds {count:,} bytes or more, and is itself of {size:,}: over "
            f"{MAX_RATIO} times as many",
            "if it is no bomb, decompress it first, and name what comes out",
        )


@contextmanager
def open_decompressed(path: Path) -> Iterator["io.BufferedReader[Any]"]:
    """Opens a file, compressed or not by its suffix, as a stream of its contents.

    Reading raises the errors of `pieces`, and MtcliError where they exceed MAX_RATIO.
    """
    with open_untrusted(path) as file:
        assert isinstance(file, io.BufferedReader), type(file)
        if path.suffix not in COMPRESSIONS:
            yield file
            return
        with io.BufferedReader(_Contents(file, path), PIECE_BYTES) as contents:
            yield contents


class _Contents(io.RawIOBase):
    """The decompressed contents of a file as a stream."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._path, self._size = path, os.fstat(file.fileno()).st_size
        self._pieces, self._left, self._count = pieces(file, path.suffix, str(path)), b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._count += len(piece)
            require_ratio(self._path, self._size, self._count)
            self._left = piece
        view = memoryview(buffer)
        count = min(len(view), len(self._left))
        view[:count], self._left = self._left[:count], self._left[count:]
        return count


def pieces(file: IO[bytes], compression: str, path: str) -> Iterator[bytes]:
    """Yields the decompressed contents of a file piece by piece, up to any damage.

    Then raises EOFError where the file is empty or ends inside a stream, and OSError without a
    number, zlib.error or lzma.LZMAError where the stream is invalid. Raises MtcliError where a
    package is missing.
    """
    if not file.read(1):
        raise EOFError("it has 0 bytes")
    file.seek(0)
    if compression == ".zst":
        yield from _zst(file, path)
    elif compression == ".xz":
        yield from _xz(file)
    elif compression:
        # read1, since read drops what it has when a file ends early.
        stream = gzip.GzipFile(fileobj=file) if compression == ".gz" else bz2.BZ2File(file)
        yield from iter(partial(stream.read1, PIECE_BYTES), b"")
    else:
        yield from iter(partial(file.read, PIECE_BYTES), b"")


def _xz(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the streams of xz or lzma; ignores trailing bytes that are no stream."""
    buffered, is_first = file.read(FED_BYTES), True
    while buffered or is_first:
        decoder = lzma.LZMADecompressor(memlimit=MAX_XZ_BYTES)
        try:
            yield decoder.decompress(buffered, PIECE_BYTES)
        except lzma.LZMAError:
            if is_first or buffered.startswith(XZ_MAGIC):
                raise
            return
        while not decoder.eof:
            data = file.read(FED_BYTES) if decoder.needs_input else b""
            if decoder.needs_input and not data:
                raise EOFError("it ends inside a stream")
            yield decoder.decompress(data, PIECE_BYTES)
        buffered, is_first = decoder.unused_data.lstrip(b"\0"), False  # zeros pad a stream
        buffered = buffered or file.read(FED_BYTES).lstrip(b"\0")


def _zst(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Yields the frames of Zstandard (RFC 8878), fed a block at a time: none gives more than 128
    KiB.

    The package does not bound what it decodes at a time: 64 KiB of blocks may hold 2 GiB.
    """
    try:
        import zstandard
    except ModuleNotFoundError:
        raise wrong(f"{path} needs the package zstandard", "pip install 'mtcli[data]'") from None
    try:
        while magic := file.read(4):
            if int.from_bytes(magic, "little") & 0xFFFFFFF0 == 0x184D2A50:  # a frame to be skipped
                size = int.from_bytes(_exactly(file, 4), "little")
                while size:
                    size -= len(_exactly(file, min(size, PIECE_BYTES)))
                continue
            parts, count = _frame(magic, file), 0
            header = next(parts)
            decoder = zstandard.ZstdDecompressor().decompressobj()
            for data in map(decoder.decompress, chain([header], parts)):
                yield data
                count += len(data)
            # The decoder compares them too, but not after a last block of 0 bytes.
            if (size := zstandard.frame_content_size(header)) not in (-1, count):
                raise OSError(f"a frame of {count} bytes, and its header says {size}")
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from None


def _frame(magic: bytes, file: IO[bytes]) -> Iterator[bytes]:
    """Yields a frame's header, its blocks and its checksum."""
    flags = _exactly(file, 1)
    of_size, is_single, has_checksum, of_dictionary = (
        flags[0] >> 6,
        flags[0] >> 5 & 1,
        flags[0] >> 2 & 1,
        flags[0] & 3,
    )
    length = 1 - is_single + (0, 1, 2, 4)[of_dictionary] + (is_single, 2, 4, 8)[of_size]
    yield magic + flags + _exactly(file, length)
    is_last = 0
    while not is_last:
        head = _exactly(file, 3)
        bits = int.from_bytes(head, "little")
        is_last, kind, size = bits & 1, bits >> 1 & 3, bits >> 3
        if size > ZST_BLOCK_BYTES:
            raise OSError(f"a block of {size} bytes, and {ZST_BLOCK_BYTES} is the most")
        # Fed block by block, the decoder takes this for an empty one; all at once, for damage.
        if kind == COMPRESSED and not size:
            raise OSError("a compressed block of 0 bytes")
        yield head + _exactly(file, 1 if kind == RLE else size)
    if has_checksum:
        yield _exactly(file, 4)


def _exactly(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise EOFError("it ends inside a frame")
    return data
