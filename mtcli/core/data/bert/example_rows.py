"""Packs labelled examples into rows: several in a row, none split."""

from collections.abc import Sequence

import numpy as np

from mtcli.core.config.blend import Which
from mtcli.core.config.errors import wrong
from mtcli.core.data.bad_lines import shown_skipped
from mtcli.core.data.bert.examples import Examples
from mtcli.core.data.bert.row_format import EncoderRows, lay_out
from mtcli.core.data.bert.special_tokens import SpecialTokens
from mtcli.core.data.best_fit import EpochRows, pack
from mtcli.core.data.blend import split_range
from mtcli.core.data.loader import SampleId
from mtcli.core.data.subset import Subset, members


class ExampleRows:
    """The packed rows of examples by global sample, each epoch in another order."""

    weights: tuple[float, ...] | None = None

    def __init__(
        self,
        sources: Sequence[tuple[str, Examples]],
        seq_len: int,
        special: SpecialTokens,
        seed: int | None = None,
        global_batch_size: int = 1,
    ) -> None:
        """Packs the examples of named sources. Without a seed every row comes once, in order.

        Raises MtcliError where an example has more tokens than a row.
        """
        self.prefixes: tuple[str, ...] = ("+".join(name for name, _ in sources),)
        self.sources = [source for _, source in sources]
        self.files = [[file for source in self.sources for file in source.files]]
        self.examples = [example for source in self.sources for example in source.examples]
        self.seq_len, self.special, self.planned = seq_len, special, 0
        self.sizes = np.array([example.size for example in self.examples], np.int64)
        if self.sizes.max() > seq_len:
            count, most = int((self.sizes > seq_len).sum()), int(self.sizes.max())
            message = f"{count} examples have up to {most} tokens, and rows batch.seq_len={seq_len}"
            raise wrong(message, f"batch.seq_len of {most} or more", "batch.seq_len")
        self.tokens = [int(self.sizes.sum())]
        self.weights_of = np.ones(len(self.examples), np.float32)
        self.epochs = EpochRows(pack(self.sizes, seq_len), seed, global_batch_size)
        self.num_samples = len(self.epochs.rows)

    def keep(self, subset: Subset) -> None:
        """Drops all examples but the members of a subset, whose losses get its weights.

        Raises MtcliError where the data lacks a member.
        """
        chosen = members(subset, [len(self.examples)])
        self.examples = [self.examples[index] for index in chosen.place.tolist()]
        self.sizes = self.sizes[chosen.place]
        self.weights_of = chosen.weights.astype(np.float32)
        self.tokens = [int(self.sizes.sum())]
        self.epochs = self.epochs.of(pack(self.sizes, self.seq_len))
        self.num_samples = len(self.epochs.rows)

    def __len__(self) -> int:
        return self.num_samples

    def rows(self, start: int, count: int) -> EncoderRows:
        """Returns rows start .. start + count - 1."""
        items = [self.epochs.items(number) for number in range(start, start + count)]
        examples = [[self.examples[item] for item in row] for row in items]
        sequences = [[text for example in row for text in example.sequences] for row in examples]
        labels = np.array([example.label for row in examples for example in row], np.int64)
        rows = lay_out(sequences, self.seq_len, self.special)
        weights = self.weights_of[np.concatenate(items)]
        return rows._replace(classes=labels, class_weights=weights)

    def order(self) -> np.ndarray:
        """Returns the numbers of the examples of all rows, in order: int64."""
        return np.concatenate([self.epochs.items(number) for number in range(len(self))])

    def sample_ids(self, start: int, count: int) -> list[SampleId]:
        """Identifies the examples in rows: (number of the example, 0, its tokens)."""
        return [
            SampleId(
                self.prefixes[0],
                tuple((int(i), 0, int(self.sizes[i])) for i in self.epochs.items(number)),
            )
            for number in range(start, start + count)
        ]

    def describe(self) -> dict[str, str]:
        """Words the data in numbers: examples to train on, and what was cut or skipped."""
        lines = {
            "data": f"{len(self.examples):,} examples, {self.tokens[0]:,} tokens",
            "packed": self.epochs.words(self.sizes, self.seq_len),
        }
        articles, questions = map(sum, zip(*(source.ended for source in self.sources), strict=True))
        if articles or questions:
            lines["cut"] = f"the article of {articles:,} questions, and of {questions:,} a choice"
        skipped = [words for source in self.sources if (words := shown_skipped(source.skipped))]
        return lines | ({"bad": "; ".join(skipped)} if skipped else {})

    def drawn(self, start: int, stop: int) -> list[int]:
        """Counts rows by dataset; all are of the only one."""
        return [stop - start]


def share_of(source: Examples, split: str, which: Which) -> Examples:
    """Selects the examples of `which` of a split. Raises MtcliError where there are none."""
    first, end = split_range(split, which, len(source.examples))
    if first == end:
        message = f'split "{split}" of {len(source.examples)} examples gives {which} none'
        raise wrong(message, 'give it a share, e.g. "90,10", or data.valid', "data.split")
    return source._replace(examples=source.examples[first:end])
