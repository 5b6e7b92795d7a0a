"""Rows of labelled examples: several in a row, none of which is split."""

from collections.abc import Sequence

import numpy as np

from mtcli.core.config.blend import Which
from mtcli.core.config.errors import wrong
from mtcli.core.data.blend import split_range
from mtcli.core.data.encoder_rows import EncoderBatches, EncoderRows, lay_out
from mtcli.core.data.examples import Example, Examples
from mtcli.core.data.loader import SampleId
from mtcli.core.data.packed_rows import Epoch, PackedRows, row_starts
from mtcli.core.data.special_tokens import SpecialTokens
from mtcli.core.data.subset import Subset, members


class ExampleRows:
    """The rows of examples by global sample, each epoch in another order, or all once in theirs."""

    weights = None

    def __init__(
        self,
        sources: Sequence[tuple[str, Examples]],
        num_samples: int | None,
        seq_len: int,
        seed: int,
        special: SpecialTokens,
    ) -> None:
        """Each source has a name. `num_samples` of None are those that hold each example once.

        Raises MtcliError where an example has more tokens than a row.
        """
        self.prefixes = ("+".join(name for name, _ in sources),)
        self.files = [[file for _, source in sources for file in source.files]]
        self.examples = [example for _, source in sources for example in source.found]
        self.seq_len, self.special, self.planned = seq_len, special, 0
        self.sizes = np.array([example.size for example in self.examples], np.int64)
        if self.sizes.max() > seq_len:
            count, most = int((self.sizes > seq_len).sum()), int(self.sizes.max())
            message = f"{count} examples have up to {most} tokens, and rows batch.seq_len={seq_len}"
            raise wrong(message, f"batch.seq_len of {most} or more", "batch.seq_len")
        self.tokens = [int(self.sizes.sum())]
        self.weights_of = np.ones(len(self.examples), np.float32)
        self.shuffled = num_samples is not None
        self.packed = PackedRows(self._epoch, seed)
        self.num_samples = self.packed.rows_of_epoch(0) if num_samples is None else num_samples

    def __len__(self) -> int:
        return self.num_samples

    def rows(self, start: int, count: int) -> EncoderRows:
        """Rows start .. start + count - 1."""
        items = [self.packed[number] for number in range(start, start + count)]
        found = [[self.examples[item] for item in row] for row in items]
        sequences = [[one for example in row for one in example.sequences] for row in found]
        labels = np.array([example.label for row in found for example in row], np.int64)
        rows = lay_out(sequences, self.seq_len, self.special)
        weights = self.weights_of[np.concatenate(items)]
        return rows._replace(classes=labels, class_weights=weights)

    def examples_of(self, number: int) -> list[Example]:
        """The examples in a row, in order."""
        return [self.examples[item] for item in self.packed[number]]

    def sample_ids(self, start: int, count: int) -> list[SampleId]:
        """Identifies the examples in rows: (number of the example, 0, its tokens)."""
        return [
            SampleId(
                self.prefixes[0],
                tuple((int(i), 0, int(self.sizes[i])) for i in self.packed[number]),
            )
            for number in range(start, start + count)
        ]

    def describe(self) -> dict[str, str]:
        """Returns no lines: what the data holds is told where it is read."""
        return {}

    def drawn(self, start: int, stop: int) -> list[int]:
        """How many of the rows start .. stop - 1 the one dataset gives."""
        return [stop - start]

    def _epoch(self, random: np.random.RandomState) -> Epoch:
        count = len(self.examples)
        items = random.permutation(count) if self.shuffled else np.arange(count)
        starts = row_starts(self.sizes[items], np.zeros(count, np.int64), self.seq_len)
        return Epoch(items, starts, np.arange(len(starts) - 1))


def kept(examples: EncoderBatches, subset: Subset) -> ExampleRows:
    """The members of a subset alone, whose losses have its weights.

    Raises MtcliError where a member is not there.
    """
    assert isinstance(examples, ExampleRows), "no subset is of rows of masked tokens"
    chosen = members(subset, [len(examples.examples)])
    examples.examples = [examples.examples[place] for place in chosen.place.tolist()]
    examples.sizes = examples.sizes[chosen.place]
    examples.weights_of = chosen.weights.astype(np.float32)
    examples.tokens = [int(examples.sizes.sum())]
    return examples


def share_of(source: Examples, split: str, which: Which) -> Examples:
    """The examples that belong to `which` of a split. Raises MtcliError where there are none."""
    first, end = split_range(split, which, len(source.found))
    if first == end:
        message = f'split "{split}" of {len(source.found)} examples gives {which} none'
        raise wrong(message, 'give it a share, e.g. "90,10", or data.valid', "data.split")
    return source._replace(found=source.found[first:end])
