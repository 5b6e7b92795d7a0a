"""Files as blocks of 2 MiB: the unit of direct writes and of hashes.

The hash of a block is its XXH3 of 128 bits. One core computes 6 to 9.5 GB/s of it; zlib's CRC-32
took one to 2.5 and two cores to 4 (Intel Xeon with AVX-512, blocks in memory). Damage goes unseen
once in 2**128. It does not prove who wrote a file that it lies beside.
"""

import mmap
import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from mtcli.core.checkpoint.manifest import BLOCK_BYTES, FileRecord
from mtcli.core.checkpoint.safetensors_file import damaged
from mtcli.core.config.untrusted import open_untrusted

THREADS = 2  # one reads while the other computes
HUGE_PAGE = 2 << 20
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of a file in `sampled_hash`: all of one up to 4 MiB
Bytes = NDArray[np.uint8]


def hash_of(data: Bytes | memoryview | bytes) -> str:
    """The hash of a block's bytes: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def sampled_hash(paths: Iterable[Path]) -> str:
    """A hash that files of other sizes, or of other bytes in the blocks looked at, change."""
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
    """New memory [size], aligned to pages, huge ones where the system has them.

    Touching new memory in ordinary pages goes at about 1 GB/s, in huge ones at 27.
    """
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    first = -whole.ctypes.data % HUGE_PAGE
    return whole[first:][:size]


def verify_file(path: Path, record: FileRecord, only: Collection[int] | None = None) -> None:
    """Raises MtcliError that names the file where a block, of those in `only`, does not have its
    hash."""
    blocks = -(-record.bytes // BLOCK_BYTES)
    if blocks != len(record.xxh3_128):
        raise damaged(path, f"it has {blocks} blocks and {len(record.xxh3_128)} hashes")
    indices = sorted(range(blocks) if only is None else only)
    parts = [indices[part::THREADS] for part in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda part: _verify_blocks(path, record, part), parts))


def _verify_blocks(path: Path, record: FileRecord, indices: list[int]) -> None:
    """Checks some blocks, all through one buffer."""
    block = memoryview(aligned_bytes(BLOCK_BYTES))
    try:
        with open_untrusted(path, 0) as file:
            for index in indices:
                at = index * BLOCK_BYTES
                count = _read(file.fileno(), block[: record.bytes - at], at)
                if hash_of(block[:count]) != record.xxh3_128[index]:
                    raise damaged(path, f"the bytes from {at} do not have the manifest's hash")
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from None


def _read(file: int, into: memoryview, at: int) -> int:
    done = 0
    while done < len(into) and (got := os.preadv(file, [into[done:]], at + done)):
        done += got
    return done
