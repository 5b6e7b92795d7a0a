"""Indices kept beside the data, built by one process and mapped by all the others."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tokenize import TokenError
from typing import TypeVar

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_magic

from mtcli.core.config.untrusted import append_untrusted, open_untrusted
from mtcli.core.data.blend import BlendOrder, blend_indices
from mtcli.core.data.indexed import Indexed, with_suffix
from mtcli.core.data.samples import Samples, build_samples

# Below this many sequences or samples the indices are made again in a second at most.
WORTH_KEEPING = 1 << 20

Arrays = TypeVar("Arrays", Samples, BlendOrder)


def cached_samples(
    data: Indexed, owned: range, num_samples: int, seq_len: int, seed: int, planned: int
) -> Samples:
    """`build_samples`, kept beside the data where the indices are large."""

    def build() -> Samples:
        return build_samples(data.lengths, owned, num_samples, seq_len, seed, planned)

    if max(len(owned), num_samples, planned) < WORTH_KEEPING:
        return build()
    stat = data.idx.stat()
    facts = [stat.st_size, stat.st_mtime_ns, data.num_tokens, owned.start, owned.stop]
    return _kept(data.prefix, [*facts, num_samples, seq_len, seed, planned], Samples, build)


def cached_blend(prefix: Path, weights: list[float], size: int) -> BlendOrder:
    """`blend_indices`, kept beside the first dataset's data where it is large."""

    def build() -> BlendOrder:
        return blend_indices(weights, size)

    if size < WORTH_KEEPING:
        return build()
    return _kept(prefix, ["blend", weights, size], BlendOrder, build)


def _kept(
    prefix: Path, facts: list[object], kind: type[Arrays], build: Callable[[], Arrays]
) -> Arrays:
    """What `build` gives, from `PREFIX.cache/` where a process with the same facts made it before.

    One process at a time builds, under a lock, so that ranks which start together share its work.
    Where the folder cannot be written, each process builds its own in memory. What came with the
    data from elsewhere is never taken: its name would need the time when `.idx` was put here.
    """
    facts = [*facts, with_suffix(prefix, ".idx").stat().st_ctime_ns]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    folder = with_suffix(prefix, ".cache") / name
    kept = load_kept(folder, kind)
    if kept is not None:
        return kept
    try:
        folder.parent.mkdir(exist_ok=True)
        with append_untrusted(folder.parent / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if load_kept(folder, kind) is None:
                _store(folder, build())
    except OSError:  # a read-only or full disk
        return build()
    return load_kept(folder, kind) or build()


def load_kept(folder: Path, kind: type[Arrays]) -> Arrays | None:
    """The arrays in `folder`, mapped; None where they are not there, not whole or no indices."""
    try:
        arrays = kind(*(_mapped(folder / f"{name}.npy") for name in kind._fields))
    except (OSError, ValueError, TokenError):
        return None
    return arrays if _are_indices(arrays) else None


def _mapped(path: Path) -> np.ndarray:
    """The array in a file of np.save, mapped. Raises ValueError where it is no plain one."""
    with open_untrusted(path) as file:
        version = read_magic(file)
        shape, is_fortran, dtype = read_array_header_1_0(file)
        if version != (1, 0) or is_fortran or dtype.hasobject:
            raise ValueError(f"{path} is not an array as np.save writes it")
        return np.memmap(file, dtype, "r", file.tell(), shape)


def _are_indices(arrays: Samples | BlendOrder) -> bool:
    """Whether they are integers in the shapes that their docstrings give."""
    shapes = [array.shape for array in arrays]
    if any(array.dtype.kind not in "iu" for array in arrays):
        return False
    if isinstance(arrays, BlendOrder):
        return shapes == [(arrays.owner.size,)] * 2
    count = arrays.order.size
    return shapes == [(arrays.documents.size,), (count + 1, 2), (count,)]


def _store(folder: Path, arrays: Samples | BlendOrder) -> None:
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    for old in (aside, folder):  # `folder` where _load found it not whole
        shutil.rmtree(old, ignore_errors=True)
    aside.mkdir()
    try:
        for name, array in zip(arrays._fields, arrays, strict=True):
            with open(aside / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
