"""Trains on a subset of the sequences of token data, with a loss weight per sequence.

Candidates are the windows of seq_len + 1 tokens, neighbours sharing one, of a dataset's sequences
concatenated in file order: they depend on no seed. A subset's file holds the chosen candidates,
their weights, the objective reached and the hashes of data and model.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError, model_validator

from mtcli.core.config.blend import Which
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.fields import Count, Positive, Section
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import load_json
from mtcli.core.data.blend import chosen, split_range
from mtcli.core.data.loader import Batches, SampleId, SampleOrder, open_blend, token_files
from mtcli.core.runtime.atomic_writes import aside

FIELD = "data.subset"
AGAIN = "choose again: mtcli select --data PREFIX --model CHECKPOINT --fraction F --output FILE"
Weight = Annotated[float, Field(gt=0.0, le=1e12, allow_inf_nan=False)]


class SourceRecord(Section):
    """A dataset that sequences were chosen from."""

    prefix: str
    """its path when sequences were chosen"""
    sha256: str
    """hash of its .bin, as `mtcli preprocess` wrote it; empty for data from another tool"""
    sampled: str
    """XXH3 (128 bits) of the sizes of its files and of 64 blocks of 64 KiB of each"""
    candidates: Count
    """number of its candidates, which are numbered after those of previous sources"""
    share: float | None = None
    """its weight in the blend; None: in proportion to its candidates"""


class ModelRecord(Section):
    """The model by whose gradients or features sequences were chosen."""

    path: str
    hash: str
    """hash of the manifest, or of blocks of the weights' files"""


class Subset(Section):
    """A weighted subset, as its file holds it."""

    kind: Literal["mtcli subset"] = "mtcli subset"
    version: Literal[1] = 1
    method: str
    """craig, dsir or random"""
    proxy: str | None
    """gradient, kronecker or features; None: without a model"""
    seed: Count
    seq_len: Positive
    """tokens of a sequence, which training on the subset must use"""
    format: str
    """data.format: tokens, or labelled examples"""
    num_candidates: Count
    objective: float | None
    """facility location of the chosen sequences over the proxies; higher is better"""
    random_objective: float | None
    """objective of as many random sequences"""
    bound: float | None
    """L: the sum of all candidates' distances to the chosen, which bounds the gradient's error"""
    random_bound: float | None
    """bound of as many random sequences"""
    error: float | None = None
    """norm of the difference of the chosen proxies' weighted sum and the sum of all proxies"""
    random_error: float | None = None
    """error of as many random sequences"""
    indices: tuple[Count, ...]
    """the chosen candidates in the order of their picks"""
    weights: tuple[Weight, ...]
    """loss weight of each chosen candidate: the number of candidates that it represents"""
    sources: tuple[SourceRecord, ...]
    model: ModelRecord | None
    target: tuple[SourceRecord, ...] = ()
    """dsir: the data that the chosen sequences are to resemble"""

    @model_validator(mode="after")
    def _is_consistent(self) -> "Subset":
        if len(self.indices) != len(self.weights):
            raise ValueError(f"{len(self.indices)} indices and {len(self.weights)} weights")
        if len(set(self.indices)) != len(self.indices) or not self.indices:
            raise ValueError("indices have to be distinct, and at least one")
        if max(self.indices) >= self.num_candidates:
            raise ValueError(f"index {max(self.indices)} of {self.num_candidates} candidates")
        if sum(source.candidates for source in self.sources) != self.num_candidates:
            raise ValueError("the candidates of the sources are not num_candidates")
        return self


class ChosenSequences(NamedTuple):
    """The members of a subset by source."""

    source: np.ndarray  # int64 [m]
    place: np.ndarray  # int64 [m], among the source's candidates
    weights: np.ndarray  # float64 [m], of mean 1


def write_subset(target: str | Path, subset: Subset) -> None:
    """Writes a subset's file. Raises MtcliError (exit 1) where the disk refuses it."""
    with aside(target) as path:
        path.write_text(json.dumps(subset.model_dump()) + "\n", encoding="utf-8")


def read_subset(path: str | Path) -> Subset:
    """Reads a subset's file. Raises MtcliError for another file."""
    fields = load_json(path, AGAIN, AGAIN, field=FIELD)
    try:
        return Subset.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][:2]))
        message = f"{path} is no subset: {f'{where}: ' if where else ''}{first['msg']}"
        raise wrong(message, AGAIN, FIELD) from None


def digest(subset: Subset) -> str:
    """Hashes a subset's members and their weights: 16 hexadecimal digits."""
    pairs = sorted(zip(subset.indices, subset.weights, strict=True))
    return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=8).hexdigest()


def require_subset(config: RunConfig) -> Subset | None:
    """Reads the subset that a run trains on, if any.

    Raises MtcliError where it is of other sequences than the run's, as far as the config tells.
    """
    if not config.data.subset:
        return None
    subset, problems = read_subset(config.data.subset), []
    if subset.seq_len != config.batch.seq_len:
        message = f"{config.data.subset} has sequences of seq_len={subset.seq_len} tokens, and the "
        message += f"run batch.seq_len={config.batch.seq_len}"
        hint = f"--set batch.seq_len={subset.seq_len}, or select with "
        hint += f"--set batch.seq_len={config.batch.seq_len}"
        problems.append(Problem(message, hint, FIELD))
    if subset.format != config.data.format:
        message = f"{config.data.subset} is of data.format={subset.format!r}, and the run has "
        problems.append(Problem(f"{message}{config.data.format!r}", AGAIN, FIELD))
    if problems:
        raise MtcliError(*problems)
    return subset


def members(subset: Subset, available: Sequence[int]) -> ChosenSequences:
    """Returns the members of a subset, ascending, by source; `available` counts each source's
    candidates.

    Raises MtcliError for a member beyond them.
    """
    ends = np.cumsum([source.candidates for source in subset.sources])
    indices = np.array(subset.indices, np.int64)
    order = np.argsort(indices)
    indices, weights = indices[order], np.array(subset.weights)[order]
    source = np.searchsorted(ends, indices, side="right")
    place = indices - np.append(0, ends)[source]
    for number, (count, record) in enumerate(zip(available, subset.sources, strict=True)):
        last = int(place[source == number].max(initial=-1))
        if last >= count:
            message = f"the subset has candidate {last} of {record.prefix}, whose training part "
            hint = "give it the data.split of the selection (`mtcli select --set data.split=...`)"
            raise wrong(f"{message}has {count}", hint, FIELD)
    return ChosenSequences(source, place, weights * (len(weights) / weights.sum()))


class TokenSequences:
    """The candidates of token data, numbered dataset by dataset."""

    def __init__(self, words: Sequence[str], split: str, seq_len: int, which: Which = "train"):
        """Opens the blend that `words` name. Raises MtcliError where files are missing, wrong or
        too short."""
        blend, self.indexed = open_blend(words, "--data")
        self.prefixes, self.shares, self.seq_len = blend.prefixes, blend.weights, seq_len
        self.owned = [range(*split_range(split, which, len(data))) for data in self.indexed]
        pairs = zip(self.indexed, self.owned, strict=True)
        self.tokens = [data.tokens_of(owned) for data, owned in pairs]
        self.counts = [max(0, tokens - 1) // seq_len for tokens in self.tokens]
        self.ends = np.cumsum(self.counts)
        problems = [
            Problem(
                f"{prefix} has {tokens:,} tokens in the {which} part of split {split!r}, and a "
                f"sequence with its labels {seq_len + 1:,}",
                "a smaller batch.seq_len, or more data",
                "batch.seq_len",
            )
            for prefix, tokens, count in zip(self.prefixes, self.tokens, self.counts, strict=True)
            if not count
        ]
        if problems:
            raise MtcliError(*problems)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def files(self) -> list[list[Path]]:
        return token_files(self.prefixes)

    def groups(self) -> list[np.ndarray]:
        """Returns the candidates of each dataset: int64, ascending."""
        bounds = [0, *self.ends.tolist()]
        return [np.arange(first, end) for first, end in zip(bounds, bounds[1:], strict=False)]

    def rows(self, candidates: np.ndarray) -> np.ndarray:
        """Reads candidates: int64 [count, seq_len + 1]."""
        rows = np.empty((len(candidates), self.seq_len + 1), np.int64)
        for row, candidate in zip(rows, candidates.tolist(), strict=True):
            source, begin = self._begin(candidate)
            row[:] = self.indexed[source].tokens[begin : begin + self.seq_len + 1]
        return rows

    def documents(self, candidates: np.ndarray) -> np.ndarray:
        """Finds the document of each token, counted from 0 in each row: int32 [count, S + 1]."""
        documents = np.empty((len(candidates), self.seq_len + 1), np.int32)
        for row, candidate in zip(documents, candidates.tolist(), strict=True):
            lengths = [count for _, _, count in self.spans(candidate)]
            row[:] = np.repeat(np.arange(len(lengths)), lengths)
        return documents

    def spans(self, candidate: int) -> tuple[tuple[int, int, int], ...]:
        """Finds (sequence, offset, tokens) of each part of a candidate."""
        source, at = self._begin(candidate)
        data, end, spans = self.indexed[source], at + self.seq_len + 1, []
        size = data.dtype.itemsize
        sequence = int(np.searchsorted(data.pointers, at * size, side="right")) - 1
        while at < end:
            start = int(data.pointers[sequence]) // size
            stop = min(end, start + int(data.lengths[sequence]))
            if stop > at:
                spans.append((sequence, at - start, stop - at))
                at = stop
            sequence += 1
        return tuple(spans)

    def source_of(self, candidate: int) -> int:
        """Returns the number of the dataset that has a candidate."""
        return int(np.searchsorted(self.ends, candidate, side="right"))

    def _begin(self, candidate: int) -> tuple[int, int]:
        """Returns (dataset, first token in its file) of a candidate."""
        source = self.source_of(candidate)
        index = candidate - (int(self.ends[source - 1]) if source else 0)
        data = self.indexed[source]
        first = int(data.pointers[self.owned[source].start]) // data.dtype.itemsize
        return source, first + index * self.seq_len


class SubsetBatches:
    """The samples of a run on a subset by global id; has the interface of `Batches`.

    Each epoch has every member once, in an order by (seed, epoch).
    """

    def __init__(
        self, sequences: TokenSequences, subset: Subset, num_samples: int, seed: int
    ) -> None:
        """Raises MtcliError where the data lacks a member."""
        self.sequences, self.subset = sequences, subset
        self.num_samples = self.planned = num_samples
        self.prefixes, self.weights = sequences.prefixes, sequences.shares
        self.tokens, self.seed, self.first = sequences.tokens, seed, 0
        self.adopt(subset, 0)

    def adopt(self, subset: Subset, first: int) -> None:
        """Switches to another subset of the same data from sample `first` on."""
        selected = members(subset, self.sequences.counts)
        starts = np.append(0, self.sequences.ends)[selected.source]
        self.members, self.first = starts + selected.place, first
        self.member_weights = selected.weights.astype(np.float32)
        self._epoch = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return self.num_samples

    @property
    def files(self) -> list[list[Path]]:
        return self.sequences.files

    def batch(self, start: int, count: int) -> np.ndarray:
        """Reads samples start .. start + count - 1: int64 [count, seq_len + 1]."""
        return self.sequences.rows(self.members[self._places(start, count)])

    def documents(self, start: int, count: int) -> np.ndarray:
        """Finds the document of each token of `batch(start, count)`: int32 [count, seq_len + 1]."""
        return self.sequences.documents(self.members[self._places(start, count)])

    def loss_weights(self, start: int, count: int) -> np.ndarray:
        """Returns the loss weight of each label, which is its sequence's: float32 [count,
        seq_len]."""
        weights = self.member_weights[self._places(start, count)]
        return np.repeat(weights[:, None], self.sequences.seq_len, axis=1)

    def padding(self, start: int, count: int) -> None:
        """Returns None: tokens fill every sample."""

    def sample_ids(self, start: int, count: int) -> list[SampleId]:
        """Identifies the spans that `batch(start, count)` is made of."""
        candidates = self.members[self._places(start, count)].tolist()
        names, source_of = self.prefixes, self.sequences.source_of
        return [
            SampleId(names[source_of(member)], self.sequences.spans(member))
            for member in candidates
        ]

    def drawn(self, start: int, stop: int) -> list[int]:
        """Counts the samples start .. stop - 1 by dataset."""
        sources = np.searchsorted(
            self.sequences.ends, self.members[self._places(start, stop - start)], side="right"
        )
        return list(np.bincount(sources, minlength=len(self.prefixes)).tolist())

    def describe(self) -> dict[str, str]:
        """Returns the subset's line of the run's header."""
        subset, size = self.subset, len(self.members)
        summary = f"{size:,} of {subset.num_candidates:,} sequences, chosen by {subset.method}"
        return {"subset": summary}

    def _places(self, start: int, count: int) -> np.ndarray:
        """Returns the index of each sample's member: int64 [count]."""
        assert self.first <= start <= start + count <= len(self), (self.first, start, count)
        epochs, places = np.divmod(np.arange(start, start + count) - self.first, len(self.members))
        positions = np.empty(count, np.int64)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            positions[of_epoch] = self._order(epoch)[places[of_epoch]]
        return positions

    def _order(self, epoch: int) -> np.ndarray:
        cached_epoch, order = self._epoch
        if cached_epoch != epoch:
            random = np.random.RandomState([self.seed, epoch, self.first % 2**32])
            order = random.permutation(len(self.members))
            self._epoch = (epoch, order)
        return order


def token_batches(
    config: RunConfig,
    which: Which,
    subset: Subset | None,
    order: SampleOrder,
    check: Callable[[TokenSequences], None] = lambda sequences: None,
) -> Batches | SubsetBatches:
    """Opens samples of a run's token data, or of its subset, whose sequences must pass `check`; see
    `Batches`."""
    paths, split = chosen(config.data, which)
    size, seed = config.batch.seq_len, config.data_seed
    if subset is not None:
        sequences = TokenSequences(paths, split, size, which)
        check(sequences)
        return SubsetBatches(sequences, subset, order.end, seed)
    first, end, planned, read = order
    return Batches(paths, split, which, end - first, size, seed, planned, first, read)


def subset_facts(subset: Subset) -> dict[str, Any]:
    """Returns the facts of a subset for a command's JSON."""
    keys = ("method", "proxy", "objective", "random_objective", "bound", "random_bound")
    more = ("error", "random_error", "num_candidates", "seq_len")
    facts = {key: getattr(subset, key) for key in keys + more}
    return facts | {"indices": list(subset.indices), "weights": list(subset.weights)}
