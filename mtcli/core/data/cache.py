"""Sample indices kept beside the data, built by one process and mapped by all the others."""

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np

from mtcli.core.data.indexed import Indexed, with_suffix
from mtcli.core.data.samples import Samples, build_samples

# Below this many sequences and samples the indices are made again in less than 0.1 s.
WORTH_KEEPING = 1 << 20


def cached_samples(
    data: Indexed, owned: range, num_samples: int | None, seq_len: int, seed: int
) -> Samples:
    """`build_samples`, from `PREFIX.cache/` where the indices are large and a process made them.

    One process at a time builds, under a lock, so that ranks which start together share its work.
    Where the folder cannot be written, each process builds its own in memory.
    """

    def build() -> Samples:
        return build_samples(data.lengths, owned, num_samples, seq_len, seed)

    if max(len(owned), num_samples or 0) < WORTH_KEEPING:
        return build()
    stat = data.idx.stat()
    facts = [stat.st_size, stat.st_mtime_ns, data.num_tokens, owned.start, owned.stop]
    text = json.dumps([*facts, num_samples, seq_len, seed])
    folder = with_suffix(data.prefix, ".cache") / hashlib.sha256(text.encode()).hexdigest()[:32]
    kept = _load(folder)
    if kept is not None:
        return kept
    try:
        folder.parent.mkdir(exist_ok=True)
        with open(folder.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if _load(folder) is None:
                _store(folder, build())
    except OSError:  # a read-only or full disk
        return build()
    return _load(folder) or build()


def _load(folder: Path) -> Samples | None:
    """The indices in `folder`, mapped; None where they are not there or not whole."""
    try:
        return Samples(
            *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Samples._fields)
        )
    except (OSError, ValueError):
        return None


def _store(folder: Path, samples: Samples) -> None:
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # what _load found not whole
    aside.mkdir()
    try:
        for name, array in zip(Samples._fields, samples, strict=True):
            with open(aside / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
