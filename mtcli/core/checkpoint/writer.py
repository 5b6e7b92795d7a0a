"""Writing tensor files at the disk's speed: bytes are gathered in an aligned buffer and hashed
while the buffers before are written past the page cache.

Buffered writes of a fresh file were measured at 0.35 of the disk (first touch of page-cache
memory), direct ones at the disk's own rate. A file system without direct I/O gets ordinary writes.
"""

import errno
import fcntl
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtcli.core.checkpoint.blocks import Bytes, aligned_bytes, hash_of
from mtcli.core.checkpoint.manifest import BLOCK_BYTES, FileRecord
from mtcli.core.checkpoint.safetensors_file import PlannedTensor, encode_header

DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system has none
ALIGNMENT = 4096  # of direct writes: a multiple of every device's block
WRITE_BYTES = 4 * BLOCK_BYTES  # in one call: smaller ones do not reach the disk's rate
WRITERS = 2  # threads: one's call waits in the kernel, so that the disk never waits for Python


def write_tensors(
    path: Path,
    plan: list[PlannedTensor],
    tensors: Iterable[Tensor],
    metadata: dict[str, str],
) -> FileRecord:
    """Writes and fsyncs a safetensors file of planned tensors, in order.

    `tensors` may be a generator: at most one of them is held at a time. Consecutive runs of a
    planned tensor's elements may stand for it. Returns the file's size and hashes. Raises
    OSError as the system does (disk full).
    """
    with BlockWriter(path) as writer:
        writer.write(np.frombuffer(encode_header(plan, metadata), dtype=np.uint8))
        parts = (tensor for tensor in tensors if tensor.numel())
        for planned in plan:
            left = planned.bytes
            while left > 0:
                data = _bytes(next(parts))
                left -= len(data)
                writer.write(data)
            assert left == 0, (planned, left)
        assert next(parts, None) is None, path
    return writer.record()


class BlockWriter:
    """A file written front to back: a buffer is filled and hashed while WRITERS are written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _direct(path), 0o644)
        self._pool = ThreadPoolExecutor(WRITERS)
        self._filling = aligned_bytes(WRITE_BYTES)
        self._writes: deque[tuple[Future[None], Bytes]] = deque()  # under way, of which buffers
        self._hashes: list[str] = []

    def __enter__(self) -> "BlockWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            os.close(self._file)

    def write(self, data: Bytes) -> None:
        """Appends bytes [n]."""
        done = 0
        while done < len(data):
            at = self.size % WRITE_BYTES
            part = data[done : done + BLOCK_BYTES - at % BLOCK_BYTES]
            # numpy's copy: torch's wakes an OpenMP thread that spins, 0.4 s of CPU time per GB
            np.copyto(self._filling[at : at + len(part)], part)
            done += len(part)
            self.size += len(part)
            if self.size % BLOCK_BYTES == 0:
                self._end_block(BLOCK_BYTES)
            if self.size % WRITE_BYTES == 0:
                self._put(WRITE_BYTES)

    def record(self) -> FileRecord:
        """The size and hashes of what was written."""
        return FileRecord(bytes=self.size, xxh3_128=self._hashes)

    def _end_block(self, count: int) -> None:
        end = (self.size - 1) % WRITE_BYTES + 1
        self._hashes.append(hash_of(self._filling[end - count : end]))

    def _put(self, count: int) -> None:
        """Has the filled bytes written, and gives the next ones a buffer."""
        padded = -(-count // ALIGNMENT) * ALIGNMENT  # the last block; truncated at the end
        view = memoryview(self._filling)[:padded]
        write = self._pool.submit(_write_at, self._file, view, self.size - count)
        self._writes.append((write, self._filling))
        if len(self._writes) <= WRITERS:
            self._filling = aligned_bytes(WRITE_BYTES)
            return
        oldest, self._filling = self._writes.popleft()
        oldest.result()

    def _finish(self) -> None:
        if rest := self.size % BLOCK_BYTES:
            self._end_block(rest)
        if rest := self.size % WRITE_BYTES:
            self._put(rest)
        for write, _ in self._writes:
            write.result()
        os.ftruncate(self._file, self.size)
        os.fsync(self._file)


def _write_at(file: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(file, view[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _drop_direct(file):
                raise


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Writes and fsyncs a small file; returns its size and hashes."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    return FileRecord(bytes=len(data), xxh3_128=[hash_of(block) for block in blocks])


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _direct(path: Path) -> int:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | DIRECT, 0o644))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    return DIRECT


def _drop_direct(file: int) -> bool:
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~DIRECT)
    return bool(flags & DIRECT)
