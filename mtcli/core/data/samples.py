"""Builds Megatron's document, sample and shuffle indices, in numpy.

The sequences of a split are repeated for E epochs, shuffled and concatenated; sample k of that
stream has the seq_len + 1 tokens from k * seq_len on, so neighbours share one token. The shuffle
index is the order of the samples. All indices equal those of megatron-core's GPTDataset (which
builds the sample index in C++).

Large indices are cached beside the data: one process builds them, all the others map them.
"""

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_magic

from mtcli.core.config.untrusted import append_untrusted, open_untrusted
from mtcli.core.data.blend_order import BlendOrder, blend_indices
from mtcli.core.data.indexed import Indexed, with_suffix
from mtcli.core.runtime.atomic_writes import atomic_file
from mtcli.core.runtime.private_folder import adds_to_caches, private_folder

FINAL_EPOCH_THRESHOLD = 0.80  # a last epoch of which less is needed is shuffled on its own
CHUNK = 1 << 20  # rows of the sample index found at a time
# Below this many sequences or samples the indices are made again in a second at most.
WORTH_KEEPING = 1 << 20


class Samples(NamedTuple):
    """The indices of one dataset and split: documents, samples and their shuffle.

    `documents` int32 [E * sequences]: the stream, as sequence numbers. `rows` int32 or int64
    [N + 1, 2]: (position in `documents`, offset in that sequence) of token k * seq_len. `order`
    uint32 or int64 [N]: the sample in row `order[i]` comes i-th.
    """

    documents: np.ndarray
    rows: np.ndarray
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)

    def fits(self) -> bool:
        """Says whether the arrays have the shapes above."""
        shapes = [array.shape for array in self]
        count = self.order.size
        return shapes == [(self.documents.size,), (count + 1, 2), (count,)]


def build_samples(
    lengths: np.ndarray,
    owned: range,
    num_samples: int | None,
    seq_len: int,
    seed: int,
    planned: int | None = None,
) -> Samples:
    """Builds the indices of `num_samples` samples (None: one epoch) of the sequences `owned`.

    `lengths` int32 [S] in tokens. The stream has as many epochs as `num_samples * seq_len + 1`
    tokens need. `planned`, the number of samples when the run began (None: `num_samples`), affects
    the order only through its number of epochs, and through whether less than 80 % of the last one
    was needed. Further epochs are appended one by one, each shuffled by (seed, epoch), so planned
    samples never move.
    """
    per_epoch = int(lengths[owned.start : owned.stop].sum(dtype=np.int64))
    assert per_epoch > 0, f"sequences {owned} hold no token"
    planned = num_samples if planned is None else planned
    first, epochs = (
        1 if count is None else -(-(count * seq_len + 1) // per_epoch)
        for count in (planned, num_samples)
    )

    def samples_of(epochs: int) -> int:
        return max(0, epochs * per_epoch - 1) // seq_len

    least = int(FINAL_EPOCH_THRESHOLD * ((per_epoch - 1) // seq_len))
    apart = planned is not None and first > 1 and planned - samples_of(first - 1) < least
    random = np.random.RandomState(seed)
    groups = [(0, first - 1), (first - 1, first)] if apart else [(0, first)]
    shuffles = [(*group, random) for group in groups]
    for epoch in range(first, epochs):
        shuffles.append((epoch, epoch + 1, np.random.RandomState([seed, epoch])))
    sequences = np.arange(owned.start, owned.stop, dtype=np.int32)
    documents = np.concatenate(
        [_shuffled(np.tile(sequences, end - begin), random) for begin, end, random in shuffles]
    )
    total = samples_of(max(first, epochs))
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    order = np.concatenate(
        [
            _shuffled(np.arange(samples_of(begin), samples_of(end), dtype=dtype), random)
            for begin, end, random in shuffles
        ]
    )
    return Samples(documents, _rows(lengths[documents], total, seq_len), order)


def _shuffled(array: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    random.shuffle(array)
    return array


def _rows(lengths: np.ndarray, num_samples: int, seq_len: int) -> np.ndarray:
    """Finds (position, offset) of every token k * seq_len, k = 0..num_samples, in the stream.

    `lengths` [P] are those of the stream's sequences, in order.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    wide = max(len(lengths), int(lengths.max())) > np.iinfo(np.int32).max
    rows = np.empty((num_samples + 1, 2), np.int64 if wide else np.int32)
    for start in range(0, num_samples + 1, CHUNK):
        tokens = np.arange(start, min(start + CHUNK, num_samples + 1), dtype=np.int64) * seq_len
        position = np.searchsorted(ends, tokens, side="right")
        rows[start : start + CHUNK, 0] = position
        rows[start : start + CHUNK, 1] = tokens - (ends[position] - lengths[position])
    rows[0] = 0  # even where the stream begins with empty sequences
    return rows


class Kept(Protocol):
    """A set of named arrays that `kept` caches: a NamedTuple whose `fits` checks their shapes."""

    _fields: Any  # a NamedTuple's own is a tuple of that many

    def fits(self) -> bool:
        """Says whether the arrays have their shapes."""

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yields the arrays."""


Arrays = TypeVar("Arrays", bound=Kept)


def cached_samples(
    data: Indexed, owned: range, num_samples: int, seq_len: int, seed: int, planned: int
) -> Samples:
    """Caches `build_samples` beside the data where the indices are large."""

    def build() -> Samples:
        return build_samples(data.lengths, owned, num_samples, seq_len, seed, planned)

    if max(len(owned), num_samples, planned) < WORTH_KEEPING:
        return build()
    stat = data.idx.stat()
    facts = [stat.st_size, stat.st_mtime_ns, data.num_tokens, owned.start, owned.stop]
    return _of_prefix(data.prefix, [*facts, num_samples, seq_len, seed, planned], Samples, build)


def cached_blend(prefix: Path, weights: list[float], size: int) -> BlendOrder:
    """Caches `blend_indices` beside the first dataset's data where it is large."""

    def build() -> BlendOrder:
        return blend_indices(weights, size)

    if size < WORTH_KEEPING:
        return build()
    return _of_prefix(prefix, ["blend", weights, size], BlendOrder, build)


def _of_prefix(
    prefix: Path, facts: list[object], kind: type[Arrays], build: Callable[[], Arrays]
) -> Arrays:
    """Caches arrays of the data at a prefix in `PREFIX.cache/`."""
    cache, index = (with_suffix(prefix, suffix) for suffix in (".cache", ".idx"))
    return kept(cache, index, facts, kind, build)


def kept(
    cache: Path, source: Path, facts: list[object], kind: type[Arrays], build: Callable[[], Arrays]
) -> Arrays:
    """Loads from the folder `cache` the arrays that `build` returned to a process with the same
    facts, or builds them.

    One process at a time builds, under a lock, so that ranks which start together share its work.
    Where the folder cannot be written or locked, one process per machine builds, in the user's
    temporary folder; where that fails too, each process builds in memory. A cache that was copied
    here with the data is never used: its name would need the time when `source` was put here.
    """
    facts = [*facts, source.stat().st_ctime_ns]
    if not adds_to_caches():
        return load_kept(cache / _name(facts), kind) or build()
    with suppress(OSError):
        return _kept(cache / _name(facts), kind, build)
    with suppress(OSError):
        folder = private_folder() / "indices" / _name([str(source.absolute()), *facts])
        return _kept(folder, kind, build)
    return build()


def _name(facts: list[object]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _kept(folder: Path, kind: type[Arrays], build: Callable[[], Arrays]) -> Arrays:
    """Loads arrays from a folder, or builds them into it. Raises OSError where it cannot be
    written."""
    arrays = load_kept(folder, kind)
    if arrays is not None:
        return arrays
    folder.parent.mkdir(exist_ok=True)
    with append_untrusted(folder.parent / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        if load_kept(folder, kind) is None:
            _store(folder, build())
    return load_kept(folder, kind) or build()


def load_kept(folder: Path, kind: type[Arrays]) -> Arrays | None:
    """Maps the arrays in `folder`; None where they are missing, truncated, not integers, or have
    other shapes."""
    try:
        arrays = kind(*(_mapped(folder / f"{name}.npy") for name in kind._fields))
    except (OSError, ValueError, TypeError, OverflowError, SyntaxError, TokenError):
        return None
    integers = all(array.dtype.kind in "iu" for array in arrays)
    return arrays if integers and arrays.fits() else None


def _mapped(path: Path) -> np.ndarray:
    """Maps the array in a file of np.save. Raises ValueError for another kind of file."""
    with open_untrusted(path) as file:
        version = read_magic(file)
        shape, is_fortran, dtype = read_array_header_1_0(file)
        if version != (1, 0) or is_fortran or dtype.hasobject:
            raise ValueError(f"{path} is not an array as np.save writes it")
        return np.memmap(file, dtype, "r", file.tell(), shape)


def _store(folder: Path, arrays: Arrays) -> None:
    folder.mkdir(exist_ok=True)
    for name, array in zip(arrays._fields, arrays, strict=True):
        with atomic_file(folder / f"{name}.npy") as path:
            np.save(path, array)
