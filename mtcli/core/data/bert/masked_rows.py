"""Builds rows of a masked language model from the sentences that `preprocess --sentences` wrote.

Documents are shuffled and their sentences fill rows. The sentences that a row has of one document
form a sequence; its two halves are swapped half of the time, for sentence-order prediction
(arXiv:1909.11942, section 3.1). A document that continues in the next row is a sequence of its own
there. Masks and swaps depend on (seed, global sample).

A row ends where the next sentence does not fit. A row's sentences depend on the data, the row's
length, the seed and the epoch's number alone, so a longer run begins with the same rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtcli.core.config.blend import Which
from mtcli.core.config.errors import wrong
from mtcli.core.data.bert.masking import mask
from mtcli.core.data.bert.row_format import EncoderRows, Segments, lay_out
from mtcli.core.data.bert.special_tokens import SpecialTokens
from mtcli.core.data.blend import Blend, split_range
from mtcli.core.data.blend_order import BlendOrder, blend_indices
from mtcli.core.data.indexed import Indexed
from mtcli.core.data.loader import SampleId, no_tokens, open_blend, token_files

SPECIAL = 3  # tokens of a sequence besides its text: [CLS] and two [SEP]
SWAPPED = 0.5  # of sequences with two halves


class Epoch(NamedTuple):
    """The rows of an epoch: row i has items[starts[order[i]] : starts[order[i] + 1]]."""

    items: np.ndarray  # int64 [n], every item once
    starts: np.ndarray  # int64 [rows + 1]
    order: np.ndarray  # int64 [rows]

    def row(self, number: int) -> np.ndarray:
        """Returns the items of a row: int64."""
        first = self.order[number]
        return self.items[self.starts[first] : self.starts[first + 1]]


def row_starts(costs: np.ndarray, opening: np.ndarray, size: int) -> np.ndarray:
    """Finds the items that begin a row of at most `size` tokens: int64 [rows + 1], the last one n.

    `costs` [n] are the tokens of each item, and `opening` [n] the further ones where it begins a
    row. Every item fits in a row of its own.
    """
    count = len(costs)
    ends = np.concatenate([[0], np.cumsum(costs, dtype=np.int64)])
    nexts = np.searchsorted(ends, ends[:-1] + size - opening, side="right") - 1
    assert (nexts > np.arange(count)).all(), f"an item of {max(costs)} tokens in rows of {size}"
    following, at, starts = nexts.tolist(), 0, [0]
    while at < count:
        at = following[at]
        starts.append(at)
    return np.array(starts, np.int64)


class PackedRows:
    """The rows of consecutive epochs, each shuffled by (seed, epoch)."""

    def __init__(self, epoch: Callable[[np.random.RandomState], Epoch], seed: int) -> None:
        """Takes `epoch`, which lays all items into rows by a random generator."""
        self._build, self._seed = epoch, seed
        self._ends: list[int] = []  # of the epochs so far, in rows
        self._current = (-1, Epoch(*(np.empty(0, np.int64),) * 3))

    def __getitem__(self, sample: int) -> np.ndarray:
        """Returns the items of row `sample`, counted over all epochs: int64."""
        while not self._ends or sample >= self._ends[-1]:
            rows = len(self._epoch(len(self._ends)).order)
            self._ends.append(rows + (self._ends[-1] if self._ends else 0))
        number = int(np.searchsorted(self._ends, sample, side="right"))
        return self._epoch(number).row(sample - (self._ends[number - 1] if number else 0))

    def rows_of_epoch(self, number: int) -> int:
        """Counts the rows of an epoch, which depend on its order."""
        return len(self._epoch(number).order)

    def _epoch(self, number: int) -> Epoch:
        if self._current[0] != number:
            random = np.random.RandomState([self._seed, number])
            self._current = (number, self._build(random))
        return self._current[1]


class OwnedSentences:
    """The sentences of a range of a dataset's documents; those longer than a row are cut."""

    def __init__(self, data: Indexed, owned: range, longest: int) -> None:
        """Takes the documents `owned`; cuts sentences of more than `longest` tokens into
        several."""
        self.data = data
        bounds = np.asarray(data.documents[owned.start : owned.stop + 1])
        first, end = int(bounds[0]), int(bounds[-1])
        lengths = np.asarray(data.lengths[first:end]).astype(np.int64)
        parts = -(-lengths // longest)  # none of an empty one
        begins = np.asarray(data.pointers[first:end]) // data.dtype.itemsize
        ends = np.cumsum(parts)
        part = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - parts, parts)
        self.sequence = np.repeat(np.arange(first, end), parts)
        self.offset = part * longest
        self.length = np.minimum(np.repeat(lengths, parts) - self.offset, longest)
        self.start = np.repeat(begins, parts) + self.offset
        bounds = np.concatenate([[0], ends])[bounds - first]  # of documents, in parts
        self.bounds = bounds[np.append(True, np.diff(bounds) > 0)]  # without empty documents
        self.document = np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    def epoch(self, size: int, random: np.random.RandomState) -> Epoch:
        """Lays all sentences into rows of `size` tokens, documents in random order."""
        order = random.permutation(len(self.bounds) - 1)
        counts = np.diff(self.bounds)[order]
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        items = np.repeat(self.bounds[:-1][order], counts) + inside
        begins = inside == 0
        costs = self.length[items] + SPECIAL * begins
        starts = row_starts(costs, SPECIAL * ~begins, size)
        return Epoch(items, starts, random.permutation(len(starts) - 1))

    def text(self, items: np.ndarray) -> np.ndarray:
        """Reads the tokens of consecutive sentences: int64."""
        parts = [self.data.tokens[self.start[i] : self.start[i] + self.length[i]] for i in items]
        return np.concatenate(parts).astype(np.int64)


class MaskedRows:
    """The rows of a masked language model, of one split of a blend, by global sample."""

    def __init__(  # noqa: PLR0913 - all that a row depends on, by name
        self,
        paths: Sequence[str],
        split: str,
        which: Which,
        num_samples: int,
        seq_len: int,
        seed: int,
        special: SpecialTokens,
        sentence_order: bool,
    ) -> None:
        """Opens the blend that `paths` name; `split`, such as "969,30,1", divides documents.

        Raises MtcliError where a file is missing or wrong, or the split owns no sentence.
        """
        self.seq_len, self.num_samples, self.planned, self.seed = seq_len, num_samples, 0, seed
        self.special, self.sentence_order = special, sentence_order
        blend, indexed = open_blend(paths)
        self.prefixes, self.weights = blend.prefixes, blend.weights
        self.sentences = [_owned(data, split, which, seq_len - SPECIAL) for data in indexed]
        self.packed = [PackedRows(partial(owned.epoch, seq_len), seed) for owned in self.sentences]
        self.tokens = [int(owned.length.sum()) for owned in self.sentences]
        self._order = self._blended(blend)

    def __len__(self) -> int:
        return self.num_samples

    def rows(self, start: int, count: int) -> EncoderRows:
        """Returns rows start .. start + count - 1, masked."""
        numbers = range(start, start + count)
        randoms = [np.random.RandomState([self.seed, *divmod(n, 2**32)]) for n in numbers]
        sequences, swaps = [], []
        for number, random in zip(numbers, randoms, strict=True):
            row = [self._segments(text, random) for text in self._texts(number)]
            sequences.append([segments for segments, _ in row])
            swaps += [swap for _, swap in row]
        rows = lay_out(sequences, self.seq_len, self.special)
        self._require_known(rows.tokens)
        pairs = zip(rows.tokens, randoms, strict=True)
        masked = [mask(row, self.special, random) for row, random in pairs]
        return rows._replace(
            tokens=np.stack([tokens for tokens, _ in masked]),
            weights=np.stack([chosen for _, chosen in masked]).astype(np.float32),
            classes=np.array([swap is True for swap in swaps], np.int64),
            class_weights=np.array([swap is not None for swap in swaps], np.float32),
        )

    def require_order(self) -> None:
        """Raises MtcliError where the model predicts sentence order and each document of a dataset
        is one sequence."""
        for one in self.sentences if self.sentence_order else ():
            if len(np.unique(one.sequence)) == len(one.bounds) - 1:
                message = f"{one.data.prefix} has one sequence per document, and no order to learn"
                hint = "write it with `mtcli preprocess --sentences`, or set "
                raise wrong(message, f"{hint}model.sentence_order = false", "data.train")

    @property
    def files(self) -> list[list[Path]]:
        return token_files(self.prefixes)

    def sample_ids(self, start: int, count: int) -> list[SampleId]:
        """Identifies the sentences that rows are made of."""
        samples = []
        for number in range(start, start + count):
            dataset, items = self._items(number)
            owned = self.sentences[dataset]
            spans = zip(
                owned.sequence[items], owned.offset[items], owned.length[items], strict=True
            )
            ids = tuple((int(a), int(b), int(c)) for a, b, c in spans)
            samples.append(SampleId(self.prefixes[dataset], ids))
        return samples

    def describe(self) -> dict[str, str]:
        """Returns no lines: the data is described when it is read."""
        return {}

    def drawn(self, start: int, stop: int) -> list[int]:
        """Counts the rows start .. stop - 1 by dataset."""
        if self._order is None:
            return [stop - start]
        owners = self._order.owner[start:stop]
        return list(np.bincount(owners, minlength=len(self.prefixes)).tolist())

    def _require_known(self, tokens: np.ndarray) -> None:
        most, size = int(tokens.max()), len(self.special.is_plain)
        if most >= size:
            message = f"{', '.join(self.prefixes)} has the id {most}, and its tokenizer {size} ids"
            hint = "name the tokenizer that made the data: data.tokenizer, or --tokenizer of eval"
            raise wrong(message, hint)

    def _blended(self, blend: Blend) -> BlendOrder | None:
        """Chooses the dataset of each row; without weights, in proportion to tokens."""
        if len(self.prefixes) == 1:
            return None
        return blend_indices(blend.weights or [float(n) for n in self.tokens], self.num_samples)

    def _items(self, number: int) -> tuple[int, np.ndarray]:
        """Returns (dataset, sentences) of a row."""
        if self._order is None:
            return 0, self.packed[0][number]
        dataset = int(self._order.owner[number])
        return dataset, self.packed[dataset][int(self._order.sample[number])]

    def _texts(self, number: int) -> list[tuple[OwnedSentences, np.ndarray]]:
        """Divides the sentences of a row by document."""
        dataset, items = self._items(number)
        owned = self.sentences[dataset]
        cuts = np.flatnonzero(np.diff(owned.document[items])) + 1
        return [(owned, part) for part in np.split(items, cuts)]

    def _segments(
        self, text: tuple[OwnedSentences, np.ndarray], random: np.random.RandomState
    ) -> tuple[Segments, bool | None]:
        """Builds a sequence, and says whether its halves are swapped; None for one of a single
        sentence."""
        owned, items = text
        if not self.sentence_order or len(items) < 2:
            return Segments(owned.text(items)), None
        pivot = random.randint(1, len(items))
        halves = owned.text(items[:pivot]), owned.text(items[pivot:])
        swap = bool(random.random_sample() < SWAPPED)
        return Segments(*(halves[::-1] if swap else halves)), swap


def _owned(data: Indexed, split: str, which: Which, longest: int) -> OwnedSentences:
    """Selects a split's documents, as Megatron's BERT splits them."""
    count = len(data.documents) - 1
    owned = range(*split_range(split, which, count))
    sentences = OwnedSentences(data, owned, longest)
    if not len(sentences.length):
        raise no_tokens(data.prefix, f'split "{split}" of {count}', which, owned, "documents")
    return sentences
