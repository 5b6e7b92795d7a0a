"""Writes and verifies files in blocks of 2 MiB, at the disk's speed.

The hash of a block is 128-bit XXH3. One core computes 6 to 9.5 GB/s of it; zlib's CRC-32 took one
to 2.5 and two cores to 4 (Intel Xeon with AVX-512, blocks in memory). Damage goes undetected with
probability 2**-128. The hash does not authenticate who wrote a file.

A writer fills and hashes an aligned buffer while previous buffers are written past the page cache.
Buffered writes of a fresh file reached 0.35 of the disk's rate (first touch of page-cache memory),
direct ones all of it. A file system without direct I/O gets ordinary writes.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from mtcli.core.checkpoint.manifest import BLOCK_BYTES, FileRecord
from mtcli.core.checkpoint.safetensors_file import CODE_BYTES, Planned, damaged, encode_header
from mtcli.core.config.untrusted import open_untrusted

DIRECT = getattr(os, "O_DIRECT", 0)  # 0 where the system has none
ALIGNMENT = 4096  # of direct writes: a multiple of every device's block
WRITE_BYTES = 4 * BLOCK_BYTES  # in one call: smaller ones do not reach the disk's rate
WRITERS = 2  # threads: one's call waits in the kernel, so that the disk never waits for Python
THREADS = 2  # of verification: one reads while the other computes
HUGE_PAGE = 2 << 20
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of a file in `sampled_hash`: all of one up to 4 MiB
Bytes = NDArray[np.uint8]


def write_tensors(
    path: Path,
    plan: list[Planned],
    tensors: Iterable[Tensor],
    metadata: dict[str, str],
    block_bytes: int = BLOCK_BYTES,
) -> FileRecord:
    """Writes and fsyncs a safetensors file of planned tensors, in order, with a hash for each block
    of `block_bytes`, a multiple of BLOCK_BYTES.

    `tensors` may be a generator, so that one tensor at a time is in memory; consecutive runs of a
    planned tensor's elements may stand for it. Returns the file's size and hashes. Raises OSError
    as the system does (disk full).
    """
    with BlockWriter(path, block_bytes) as writer:
        writer.write(np.frombuffer(encode_header(plan, metadata), dtype=np.uint8))
        runs = (tensor for tensor in tensors if tensor.numel())
        for name, code, shape in plan:
            left = prod(shape) * CODE_BYTES[code]
            while left > 0:
                run = next(runs).detach().cpu().contiguous()
                left -= run.nbytes
                writer.write(run.view(-1).view(torch.uint8).numpy())
            assert left == 0, (name, left)
        assert next(runs, None) is None, path
    return writer.record()


class BlockWriter:
    """A file written front to back: one buffer is filled and hashed while up to WRITERS are
    written."""

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self.path, self.block_bytes = path, block_bytes
        self.size = 0
        self._file = _create(path)
        self._pool = ThreadPoolExecutor(WRITERS)
        self._filling = aligned_bytes(WRITE_BYTES)
        self._writes: deque[tuple[Future[None], Bytes]] = deque()  # submitted, with their buffers
        self._hashes: list[str] = []
        self._hasher = xxhash.xxh3_128()

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
            chunk = data[done : done + BLOCK_BYTES - at % BLOCK_BYTES]
            # numpy's copy: torch's wakes an OpenMP thread that spins, 0.4 s of CPU time per GB
            np.copyto(self._filling[at : at + len(chunk)], chunk)
            done += len(chunk)
            self.size += len(chunk)
            if self.size % BLOCK_BYTES == 0:
                self._hash(BLOCK_BYTES)
            if self.size % WRITE_BYTES == 0:
                self._put(WRITE_BYTES)

    def record(self) -> FileRecord:
        """Returns the size and hashes of the file so far."""
        hashes, size = self._hashes, self.block_bytes
        return FileRecord(bytes=self.size, xxh3_128=hashes, block_bytes=size)

    def _hash(self, count: int) -> None:
        """Hashes the last `count` bytes written, and ends the block where they complete it."""
        end = (self.size - 1) % WRITE_BYTES + 1
        self._hasher.update(self._filling[end - count : end].data)
        if self.size % self.block_bytes == 0:
            self._end_block()

    def _end_block(self) -> None:
        self._hashes.append(self._hasher.hexdigest())
        self._hasher.reset()

    def _put(self, count: int) -> None:
        """Submits the filled buffer to the writers, and takes a free one."""
        padded = -(-count // ALIGNMENT) * ALIGNMENT  # the last block; truncated at the end
        view = self._filling.data[:padded]
        write = self._pool.submit(_write_at, self._file, view, self.size - count)
        self._writes.append((write, self._filling))
        if len(self._writes) <= WRITERS:
            self._filling = aligned_bytes(WRITE_BYTES)
            return
        oldest, self._filling = self._writes.popleft()
        oldest.result()

    def _finish(self) -> None:
        if remaining := self.size % BLOCK_BYTES:
            self._hash(remaining)
        if self.size % self.block_bytes:
            self._end_block()
        if remaining := self.size % WRITE_BYTES:
            self._put(remaining)
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
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~DIRECT)
            if error.errno != errno.EINVAL or not flags & DIRECT:
                raise


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Writes and fsyncs a small file; returns its size and hashes."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    return FileRecord(bytes=len(data), xxh3_128=[hash_of(block) for block in blocks])


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


def hash_of(data: bytes) -> str:
    """Hashes a block's bytes: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def sampled_hash(paths: Iterable[Path]) -> str:
    """Hashes files by their sizes and by sampled blocks of each."""
    hasher = xxhash.xxh3_128()
    for path in paths:
        size = path.stat().st_size
        hasher.update(size.to_bytes(8, "little"))
        last = max(0, size - SAMPLE_BYTES)
        with open_untrusted(path, 0) as file:
            for block in range(SAMPLES):
                at = max(block * SAMPLE_BYTES, last * block // (SAMPLES - 1))
                hasher.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
    return hasher.hexdigest()


def aligned_bytes(size: int) -> Bytes:
    """Allocates memory [size] aligned to pages, huge ones where the system has them.

    Touching new memory runs at about 1 GB/s in ordinary pages, and at 27 GB/s in huge ones.
    """
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, dtype=np.uint8)
    return data[-data.ctypes.data % HUGE_PAGE :][:size]


def verify_file(path: Path, record: FileRecord, only: Collection[int] | None = None) -> None:
    """Checks the blocks of a file in `only`, or all. Raises MtcliError that names the file where
    one does not have its hash."""
    blocks = -(-record.bytes // record.block_bytes)
    if blocks != len(record.xxh3_128):
        raise damaged(path, f"it has {blocks} blocks and {len(record.xxh3_128)} hashes")
    indices = sorted(range(blocks) if only is None else only)
    shares = [indices[thread::THREADS] for thread in range(THREADS)]
    try:
        with open_untrusted(path, 0) as file, ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda share: verify_blocks(file.fileno(), path, record, share), shares))
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from None


def verify_blocks(file: int, path: Path, record: FileRecord, indices: list[int]) -> None:
    """Checks some blocks through one buffer."""
    buffer = aligned_bytes(BLOCK_BYTES).data
    for index in indices:
        at, hasher = index * record.block_bytes, xxhash.xxh3_128()
        done, size = 0, min(record.block_bytes, record.bytes - at)
        while done < size and (got := os.preadv(file, [buffer[: size - done]], at + done)):
            hasher.update(buffer[:got])
            done += got
        if hasher.hexdigest() != record.xxh3_128[index]:
            raise damaged(path, f"the bytes from {at} do not have the manifest's hash")
