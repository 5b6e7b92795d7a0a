"""Reads batches of token arrays, and checks that their ids fit the model.

Sample i of a run depends only on the data, the seed and the number of samples planned: it has the
same tokens on every layout, after every restart and for any micro-batch size. A rank reads the
samples it owns from memory-mapped files.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from psutil import virtual_memory

from mtcli.core.config.blend import Which
from mtcli.core.config.errors import MtcliError, collect_errors, wrong
from mtcli.core.config.schema import DataConfig, RunConfig
from mtcli.core.data.blend import (
    SURPLUS,
    Blend,
    normalised,
    parse_blend,
    shares_of,
    split_range,
)
from mtcli.core.data.indexed import Indexed, max_token_id, with_suffix
from mtcli.core.data.samples import Samples, cached_blend, cached_samples

SAMPLE_BYTES = 12
WINDOW = 1024  # samples whose segments are found at once: 0.3 us each, against 5 us one by one


class SampleId(NamedTuple):
    """The spans (sequence, offset, tokens) of a sample in the dataset at `prefix`."""

    prefix: str
    spans: tuple[tuple[int, int, int], ...]


class SampleOrder(NamedTuple):
    """The samples first .. end - 1 of a run, which have one order."""

    first: int
    end: int
    planned: int | None = None  # their number when the run began, which decides the order
    read: Sequence[int] = ()  # samples of each dataset before them; none: 0


class RunData(Protocol):
    """The samples of a run by global id, and the datasets that they come from: none by default."""

    prefixes: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None
    planned: int = 0
    """samples that the run was to have when it began"""

    def __len__(self) -> int:
        """The samples of the run."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of each dataset, in an epoch."""
        return ()

    @property
    def files(self) -> list[list[Path]]:
        return []

    def sample_ids(self, start: int, count: int) -> list[SampleId]:
        """Identifies samples by where their tokens come from."""
        return []

    def drawn(self, start: int, stop: int) -> list[int]:
        """Counts how many of the samples start .. stop - 1 each dataset gives."""
        return []

    def describe(self) -> dict[str, str]:
        """Describes the data in the words that a run says first, by name."""
        return {}


class TokenBatches(RunData, Protocol):
    """The samples of a language model's data."""

    def batch(self, start: int, count: int) -> np.ndarray:
        """Reads samples start .. start + count - 1: int64 [count, seq_len + 1]."""

    def documents(self, start: int, count: int) -> np.ndarray:
        """Finds the document of each token: int32 [count, seq_len + 1]."""

    def loss_weights(self, start: int, count: int) -> np.ndarray | None:
        """The weight of each label's loss: float32 [count, seq_len]; None: 1, of all samples."""
        return None

    def padding(self, start: int, count: int) -> np.ndarray | None:
        """Says which tokens fill rows up: bool [count, seq_len]; None: none, of all samples."""
        return None


class _Dataset(NamedTuple):
    data: Indexed
    samples: Samples

    def starts(self, sequence: np.ndarray | int) -> np.ndarray:
        """Returns the offsets of sequences in the tokens: int64, in the shape of `sequence`."""
        offsets: np.ndarray = self.data.pointers[sequence] // self.data.tokens.itemsize
        return offsets


class _Segments(NamedTuple):
    """The token ranges that, concatenated, are the samples of a window."""

    first: int  # the window's first sample, by its place among those of a `Batches`
    bounds: list[int]  # [samples + 1]: which segments are sample k's
    dataset: list[int]
    sequence: list[int]
    start: list[int]  # in tokens of the file
    stop: list[int]


class Batches:
    """The samples of one split of a blend, by global id in consumption order."""

    def __init__(  # noqa: PLR0913 - all that a sample depends on, by name
        self,
        paths: Sequence[str],
        split: str,
        which: Which,
        num_samples: int,
        seq_len: int,
        seed: int,
        planned: int | None = None,
        first: int = 0,
        read: Sequence[int] = (),
    ) -> None:
        """Opens the blend that `paths` name; `split` is like "969,30,1", as in Megatron's flags.

        `planned` is the number of samples when the run began, which decides their order (None:
        `num_samples`). The first one has the global id `first`, and each dataset begins after the
        samples of it that were `read` before (0). Raises MtcliError where a file is missing or
        wrong, or the split owns no tokens.
        """
        self.seq_len, self.num_samples, self.first = seq_len, num_samples, first
        self.planned = num_samples if planned is None else planned
        blend, indexed = open_blend(paths)
        self.prefixes, self.weights = blend.prefixes, blend.weights
        owned = [_owned(data, split, which) for data in indexed]
        self.tokens = [data.tokens_of(part) for data, part in zip(indexed, owned, strict=True)]
        weights, first_sizes = _plan(blend, self.tokens, self.planned, seq_len)
        _require_memory(max(num_samples, self.planned))
        sizes = first_sizes
        if num_samples > self.planned:  # with the same weights, so that a blend's order goes on
            shares = weights and shares_of(num_samples, normalised(weights), SURPLUS)
            sizes = shares or [num_samples]
        self.read = list(read) or [0] * len(indexed)
        first_sizes, sizes = (
            [size + begin for size, begin in zip(part, self.read, strict=True)]
            for part in (first_sizes, sizes)
        )
        self._datasets = [
            _Dataset(data, cached_samples(data, part, size, seq_len, seed, planned_size))
            for data, part, size, planned_size in zip(
                indexed, owned, sizes, first_sizes, strict=True
            )
        ]
        self._order = cached_blend(indexed[0].prefix, weights, num_samples) if weights else None
        self._window: _Segments | None = None

    def __len__(self) -> int:
        """One more than the last sample's global id."""
        return self.first + self.num_samples

    def batch(self, start: int, count: int) -> np.ndarray:
        """Reads samples start .. start + count - 1: int64 [count, seq_len + 1]."""
        parts: list[np.ndarray] = []
        for window, first, last in self._windows(start, count):
            for number in set(window.dataset[first:last]):
                self._datasets[number].data.require_whole()
            for segment in range(first, last):
                tokens = self._datasets[window.dataset[segment]].data.tokens
                parts.append(tokens[window.start[segment] : window.stop[segment]])
        out = np.empty((count, self.seq_len + 1), np.int64)
        if parts:
            np.concatenate(parts, out=out.reshape(-1), casting="unsafe")  # uint16 or int32 widened
        return out

    def documents(self, start: int, count: int) -> np.ndarray:
        """Numbers the document of each token of `batch(start, count)` within its row: int32 [count,
        seq_len + 1], from 0.

        A document is a sequence of the .idx.
        """
        lengths: list[int] = []
        for window, first, last in self._windows(start, count):
            starts, stops = window.start[first:last], window.stop[first:last]
            lengths += [stop - begin for begin, stop in zip(starts, stops, strict=True)]
        flat = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        rows = flat.reshape(count, self.seq_len + 1)
        return rows - rows[:, :1]

    def loss_weights(self, start: int, count: int) -> np.ndarray | None:
        """Returns None: every label's loss has weight 1."""
        return None

    def padding(self, start: int, count: int) -> None:
        """Returns None: tokens fill every sample."""

    def describe(self) -> dict[str, str]:
        """Returns no lines: preprocess has described the data."""
        return {}

    @property
    def files(self) -> list[list[Path]]:
        return token_files(self.prefixes)

    def sample_ids(self, start: int, count: int) -> list[SampleId]:
        """Identifies the spans that `batch(start, count)` is made of."""
        return [self._sample_id(number) for number in range(start, start + count)]

    def drawn(self, start: int, stop: int) -> list[int]:
        """Counts the samples start .. stop - 1 by dataset."""
        assert self.first <= start <= stop <= len(self), (self.first, start, stop, len(self))
        if self._order is None:
            return [stop - start]
        owners = self._order.owner[start - self.first : stop - self.first]
        return list(np.bincount(owners, minlength=len(self._datasets)).tolist())

    def _sample_id(self, number: int) -> SampleId:
        ((window, first, last),) = self._windows(number, 1)
        dataset = window.dataset[first]
        starts = self._datasets[dataset].starts
        spans = []
        for segment in range(first, last):
            sequence, begin = window.sequence[segment], window.start[segment]
            spans.append((sequence, begin - int(starts(sequence)), window.stop[segment] - begin))
        return SampleId(self.prefixes[dataset], tuple(spans))

    def _windows(self, start: int, count: int) -> list[tuple[_Segments, int, int]]:
        """Lists the windows that hold samples start .. start + count - 1, and the range of segments
        in each."""
        assert self.first <= start <= start + count <= len(self), (self.first, start, count)
        start, windows = start - self.first, []
        while count > 0:
            window = self._window
            if window is None or start // WINDOW * WINDOW != window.first:
                first = start // WINDOW * WINDOW
                window = self._segments(first, min(WINDOW, self.num_samples - first))
                self._window = window
            begin = start - window.first
            end = min(begin + count, len(window.bounds) - 1)
            windows.append((window, window.bounds[begin], window.bounds[end]))
            start, count = start + end - begin, count - (end - begin)
        return windows

    def _segments(self, first: int, count: int) -> _Segments:
        """Builds the segments of `count` samples from the `first` one of these on."""
        if self._order is None:
            owner, sample = np.zeros(count, np.int16), np.arange(first, first + count)
        else:
            owner, sample = (array[first : first + count] for array in self._order)
        pieces = []
        for number, dataset in enumerate(self._datasets):
            positions = np.flatnonzero(owner == number)
            if len(positions):
                ids = self.read[number] + sample[positions]
                pieces.append(_spans(dataset, number, positions, ids))
        joined = np.concatenate(pieces, axis=1)
        if len(pieces) > 1:
            joined = joined[:, np.argsort(joined[0], kind="stable")]
        batch_row, dataset, sequence, start, stop = joined
        bounds = np.searchsorted(batch_row, np.arange(count + 1))
        columns = (bounds, dataset, sequence, start, stop)
        return _Segments(first, *(column.tolist() for column in columns))


def _require_memory(num_samples: int) -> None:
    """Raises MtcliError where the order of a run's samples exceeds this machine's memory: 12 bytes
    per sample, for its row and its number (`samples.Samples`)."""
    need, memory = SAMPLE_BYTES * num_samples, virtual_memory().total
    if need > memory:
        message = f"the order of {num_samples:,} samples takes {need / 2**30:,.0f} GiB, "
        message += f"and this machine has {memory / 2**30:,.0f} GiB"
        raise wrong(message, "fewer train.steps, or a smaller batch.global_batch_size")


def _owned(data: Indexed, split: str, which: Which) -> range:
    owned = range(*split_range(split, which, len(data)))
    if not data.tokens_of(owned):
        raise no_tokens(data.prefix, f'split "{split}" of {len(data)}', which, owned, "sequences")
    return owned


def no_tokens(prefix: Path, share: str, which: Which, owned: range, kind: str) -> MtcliError:
    """Builds the error of a split whose sequences or documents (`kind`) hold no token; `share`
    words how much data the split has."""
    return wrong(
        f"{share} {kind} gives {which} {kind} {owned.start} to {owned.stop}, "
        f"which hold no token, in {prefix}",
        'give it a larger share of the split, e.g. "90,5,5", or data of its own',
    )


def _plan(
    blend: Blend, tokens: list[int], planned: int, seq_len: int
) -> tuple[list[float] | None, list[int]]:
    """Returns the weights of a blend, and the number of samples to index in each dataset."""
    if len(tokens) == 1 and blend.weights is None:
        return None, [planned]
    if blend.weights is not None:
        weights = list(blend.weights)
        return weights, shares_of(planned, weights, SURPLUS)
    lengths = [(count - 1) // seq_len for count in tokens]
    if planned <= sum(lengths):
        return [float(length) for length in lengths], lengths  # an epoch of each
    # Megatron stops here, at one epoch; more epochs in the same proportions serve a long run.
    total = sum(tokens)
    weights = [count / total for count in tokens]
    return weights, shares_of(planned, weights, SURPLUS)


def _spans(dataset: _Dataset, number: int, batch_rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns int64 [5, segments]: batch row (of `batch_rows`), dataset, sequence, start and stop,
    in order.

    Sample k of the dataset runs from row order[k] of the sample index to the next, inclusive.
    """
    samples = dataset.samples
    rows = samples.order[ids].astype(np.int64)
    first, last = samples.rows[rows].astype(np.int64), samples.rows[rows + 1].astype(np.int64)
    counts = last[:, 0] - first[:, 0] + 1
    ends = np.cumsum(counts)
    begins = ends - counts
    position = np.arange(ends[-1]) + np.repeat(first[:, 0] - begins, counts)
    sequence = samples.documents[position].astype(np.int64)
    start = dataset.starts(sequence)
    stop = start + dataset.data.lengths[sequence]
    stop[ends - 1] = start[ends - 1] + last[:, 1] + 1
    start[begins] += first[:, 1]
    spans = np.stack(
        [np.repeat(batch_rows, counts), np.full_like(start, number), sequence, start, stop]
    )
    return spans[:, stop > start]


def open_blend(words: Sequence[str], field: str = "") -> tuple[Blend, list[Indexed]]:
    """Opens the datasets that `words` name, and their blend.

    Raises MtcliError with every file that is missing or wrong.
    """
    blend = parse_blend(words, field)
    return blend, collect_errors(*(partial(Indexed, prefix) for prefix in blend.prefixes))


def token_files(prefixes: Sequence[str]) -> list[list[Path]]:
    return [[with_suffix(prefix, suffix) for suffix in (".bin", ".idx")] for prefix in prefixes]


def require_named(data: DataConfig) -> None:
    """Raises MtcliError where a run names no data to train on."""
    if not data.train:
        hint = (
            "name the PREFIX that `mtcli preprocess` wrote, --set 'data.train=[\"data/a\"]', or a "
        )
        hint += "JSONL of conversations, --set data.train=my.jsonl"
        raise wrong("there is no training data", hint, "data.train")


def require_data(config: RunConfig) -> None:
    """Raises MtcliError with all faults of the files of a run's data, or where their ids exceed the
    model's vocabulary."""
    data = config.data
    require_named(data)
    if data.format != "tokens":  # conversations are read before a run is planned, examples in it
        return
    opened = (partial(open_blend, words, field) for field, words in config.words_by_field.items())
    for blend, _ in collect_errors(*opened):
        require_stated_ids(blend.prefixes, config.model.vocab_size)


def require_ids(batches: RunData, start: int, rows: np.ndarray, vocab_size: int) -> None:
    """Checks every id of `rows`, which are `batches.batch(start, ...)`: int64 [count, seq_len + 1].

    Raises MtcliError with source, document and id of the first one outside of the vocabulary.
    """
    # As uint64 an id below 0 is above 2**62, so that one pass of 0.1 ns a token sees both ends.
    if rows.size == 0 or rows.view(np.uint64).max() < vocab_size:
        return
    row, column = np.argwhere((rows < 0) | (rows >= vocab_size))[0].tolist()
    token, sample = int(rows[row, column]), batches.sample_ids(start + row, 1)[0]
    for sequence, offset, count in sample.spans:
        if column < count:
            where = f"{sample.prefix}: token {offset + column} of document {sequence}"
            raise _unknown_id(f"{where} is id", token, vocab_size)
        column -= count
    raise AssertionError(f"a row of {sample} holds {rows.shape[1]} tokens")


def require_stated_ids(prefixes: Sequence[str], vocab_size: int) -> None:
    """Raises MtcliError with each dataset whose PREFIX.json has ids outside of the vocabulary."""

    def require(prefix: str) -> None:
        largest = max_token_id(prefix)
        if largest is not None and largest >= vocab_size:
            raise _unknown_id(f"{prefix}: the largest token id is", largest, vocab_size)

    collect_errors(*(partial(require, prefix) for prefix in dict.fromkeys(prefixes)))


def _unknown_id(what: str, token: int, vocab_size: int) -> MtcliError:
    hint = f"--set model.vocab_size={token + 1}, or preprocess with the model's tokenizer"
    if token < 0:
        hint = "write the data again: no tokenizer gives such an id"
    message = f"{what} {token}, and vocab_size={vocab_size} takes 0 to {vocab_size - 1}"
    return wrong(message, hint, "model.vocab_size")


class CountedTokens(TokenBatches):
    """A dataset of tokens 0, 1, 2, ..., each sample one document; read as `Batches` are.

    Profiles use it, as their work does not depend on the text.
    """

    def __init__(self, seq_len: int, vocab_size: int, num_samples: int) -> None:
        self.seq_len, self.vocab_size, self.num_samples = seq_len, vocab_size, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, start: int, count: int) -> np.ndarray:
        """Builds samples start ... start + count - 1: int64 [count, seq_len + 1]."""
        first = np.arange(start, start + count, dtype=np.int64)[:, None] * self.seq_len
        return (first + np.arange(self.seq_len + 1)) % self.vocab_size

    def documents(self, start: int, count: int) -> np.ndarray:
        """Returns zeros, int32 [count, seq_len + 1]: each sample is one document."""
        return np.zeros((count, self.seq_len + 1), np.int32)
