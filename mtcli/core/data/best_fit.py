"""Packs examples into rows of seq_len + 1 tokens: several in a row, none split.

Best fit of decreasing lengths: the longest remaining example goes to the row that it leaves the
least room in. Document masks and positions make every example a document, so its neighbours do not
matter. The seed shuffles the rows of each epoch.

An epoch is a whole number of global batches: its last one is filled up with rows of padding, whose
losses have weight 0. So each example is read once per epoch, and an epoch's first step depends on
no layout.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtcli.core.config.blend import Which, read_blend
from mtcli.core.config.counts import counted
from mtcli.core.config.errors import collect_errors, wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import listed
from mtcli.core.data.blend import chosen, split_range
from mtcli.core.data.chat_template import load_chat_template
from mtcli.core.data.conversations import ChatExamples, ExampleTokenizer, read_examples
from mtcli.core.data.loader import SampleId
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.runtime.remote import local_copy
from mtcli.core.runtime.sandbox import OverLimit


class Rows(NamedTuple):
    """Examples in rows: row r has those of `order` [S] from `bounds[r]` to `bounds[r + 1]`."""

    order: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1


def pack(lengths: np.ndarray, room: int) -> Rows:
    """Packs examples of lengths [S], each of 1 to `room` tokens, into rows of `room`.

    Best fit decreasing takes at most 11/9 of the fewest rows, plus one (D. S. Johnson, 1973). Rows
    with n tokens of room are a stack; bit n of an integer says whether the stack holds any, so a
    search reads room / 64 words.
    """
    assert len(lengths) and 1 <= lengths.min() <= lengths.max() <= room, (lengths, room)
    stacks: dict[int, list[int]] = {}
    open_rooms, count = 0, 0
    row_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    for example, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = open_rooms >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = stacks[left].pop()
            if not stacks[left]:
                open_rooms ^= 1 << left
        else:
            row, left, count = count, room, count + 1
        row_of[example] = row
        left -= length
        if left:
            stacks.setdefault(left, []).append(row)
            open_rooms |= 1 << left
    by_row = np.argsort(row_of, kind="stable")
    return Rows(by_row, np.searchsorted(row_of[by_row], np.arange(count + 1)))


class EpochRows:
    """Packed rows by global sample. (seed, epoch) shuffles each epoch; without a seed the order
    stays. Rows of padding fill up an epoch's last global batch."""

    def __init__(self, rows: Rows, seed: int | None, global_batch_size: int) -> None:
        self.rows, self._seed, self._batch = rows, seed, global_batch_size
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def of(self, rows: Rows) -> "EpochRows":
        """Returns the epochs of other rows, with the same seed and global batch."""
        return EpochRows(rows, self._seed, self._batch)

    @property
    def steps_per_epoch(self) -> int:
        """The global batches of an epoch, its padded last one included."""
        return -(-len(self.rows) // self._batch)

    def number(self, sample: int) -> int:
        """Returns the row of a sample; -1 for padding."""
        epoch, at = divmod(sample, self.steps_per_epoch * self._batch)
        if at >= len(self.rows):
            return -1
        if self._order[0] != epoch:
            order = np.arange(len(self.rows))
            if self._seed is not None:
                order = np.random.RandomState([self._seed, epoch]).permutation(order)
            self._order = (epoch, order)
        return int(self._order[1][at])

    def items(self, sample: int) -> np.ndarray:
        row = self.number(sample)
        if row < 0:
            return np.empty(0, np.int64)
        return self.rows.order[self.rows.bounds[row] : self.rows.bounds[row + 1]]

    def words(self, lengths: np.ndarray, size: int, more: int = 0) -> str:
        """Words how full the rows of `size` + `more` tokens are, with examples of these lengths."""
        full = int(lengths.sum()) / (len(self.rows) * (size + more))
        words = f"in {counted(len(self.rows), 'row')} of {size:,}, {full:.0%} full: "
        return words + f"{counted(self.steps_per_epoch, 'step')} an epoch"


class PackedConversations:
    """The rows of conversations, by global id in consumption order; has the interface of
    `Batches`."""

    def __init__(
        self,
        paths: Sequence[str],
        config: RunConfig,
        tokenize: ExampleTokenizer,
        which: Which,
        field: str,
    ) -> None:
        """Reads the files at `paths`, which `field` of the config names.

        Raises MtcliError where a file cannot be read or has bad lines, or the split gives no
        conversation, and OverLimit.
        """
        self.seq_len = config.batch.seq_len
        self.weights: tuple[float, ...] | None = None
        self.prefixes = read_blend(paths, field)[0]
        self.paths = collect_errors(*(partial(local_copy, name) for name in self.prefixes))
        read = (partial(read_examples, path, tokenize, field) for path in self.paths)
        self.examples = collect_errors(*read)
        split = chosen(config.data, which)[1]
        owned = [_share(examples, split, which) for examples in self.examples]
        self.source = np.repeat(np.arange(len(owned)), [len(part) for part in owned])
        self.number = np.concatenate([np.arange(part.start, part.stop) for part in owned])
        if not len(self.number):
            sizes = " + ".join(str(len(examples.bounds) - 1) for examples in self.examples)
            message = f'split "{split}" of {sizes} conversations gives {which} none'
            raise wrong(message, "give it a larger share, or data of its own", "data.split")
        pairs = zip(self.examples, owned, strict=True)
        of_examples = [
            np.stack([read.lengths, read.lines, read.turns, read.shared])[:, part.start : part.stop]
            for read, part in pairs
        ]
        self.lengths, self.lines, self.turns, self.shared = np.concatenate(of_examples, axis=1)
        self.rows = pack(self.lengths, self.seq_len + 1)
        # the row of a mixture belongs to the source of its first example
        self.row_source = self.source[self.rows.order[self.rows.bounds[:-1]]]
        counts = np.bincount(self.row_source, minlength=len(owned))
        self.tokens = [max(1, int(count) * self.seq_len) for count in counts]
        self.pad_id = tokenize.tokenizer.eod_id or 0
        self.num_samples = self.planned = 0
        self.epochs = EpochRows(self.rows, config.data_seed, config.batch.global_batch_size)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def files(self) -> list[list[Path]]:
        return [[path] for path in self.paths]

    def batch(self, start: int, count: int) -> np.ndarray:
        """Reads rows start .. start + count - 1: int64 [count, seq_len + 1]."""
        out = np.full((count, self.seq_len + 1), self.pad_id, np.int64)
        for row, at, source, tokens in self._placed(start, count):
            out[row, at] = self.examples[source].tokens[tokens]
        return out

    def documents(self, start: int, count: int) -> np.ndarray:
        """Numbers the example of each token within its row: int32 [count, seq_len + 1]; padding has
        the number after the last."""
        out = np.zeros((count, self.seq_len + 1), np.int32)
        for row, at, *_ in self._placed(start, count):
            out[row, at.stop :] = out[row, at.start] + 1
        return out

    def loss_weights(self, start: int, count: int) -> np.ndarray:
        """Returns the weight of each label's loss: float32 [count, seq_len]; 0 for tokens without a
        loss."""
        out = np.zeros((count, self.seq_len + 1), np.float32)
        for row, at, source, tokens in self._placed(start, count):
            out[row, at] = self.examples[source].weights[tokens]
        return np.ascontiguousarray(out[:, 1:])

    def padding(self, start: int, count: int) -> np.ndarray:
        """Marks the padding among a row's inputs: bool [count, seq_len]."""
        out = np.ones((count, self.seq_len + 1), bool)
        for row, at, *_ in self._placed(start, count):
            out[row, at] = False
        return np.ascontiguousarray(out[:, :-1])

    def sample_ids(self, start: int, count: int) -> list[SampleId]:
        """Identifies each row by its examples' line numbers and the file of its first example."""
        samples = []
        for number in range(start, start + count):
            examples = self.epochs.items(number)
            spans = tuple((int(self.lines[e]), 0, int(self.lengths[e])) for e in examples)
            first = self.source[examples[0]] if len(examples) else 0
            samples.append(SampleId(self.prefixes[first], spans or ((0, 0, self.seq_len + 1),)))
        return samples

    def drawn(self, start: int, stop: int) -> list[int]:
        """Counts the rows start .. stop - 1 by file, without padding."""
        rows = [row for number in range(start, stop) if (row := self.epochs.number(number)) >= 0]
        return list(np.bincount(self.row_source[rows], minlength=len(self.prefixes)).tolist())

    def describe(self) -> dict[str, str]:
        """Words the data in numbers: examples and tokens to train on, and each file's skipped
        lines."""
        counts = self._per_conversation()
        unrolled, repeated = counts[counts > 1], int(self.shared.sum())
        new_tokens = int(self.lengths.sum()) - repeated
        talks = f" of {counted(len(counts), 'conversation')}" if len(unrolled) else ""
        lines = {
            "data": f"{counted(len(self.lengths), 'example')}{talks}, {new_tokens:,} tokens, "
            f"{self._tokens_with_loss():,} of them with a loss",
            "packed": self.epochs.words(self.lengths, self.seq_len, 1),
        }
        if len(unrolled):
            lines["turns"] = (
                f"{counted(len(unrolled), 'conversation')} {'is' if len(unrolled) == 1 else 'are'} "
                f"{unrolled.sum():,} examples, one a turn, as "
                "the chat template shows turns otherwise once others follow; "
                f"they read {repeated:,} tokens again"
            )
        left_out = [
            f"{count} {kind}, {name}:{', '.join(map(str, named))}{', ...' * (count > len(named))}"
            for name, examples in zip(self.prefixes, self.examples, strict=True)
            for kind, (count, named) in examples.skipped_by_kind.items()
        ]
        unread = [
            f"{key!r} of {count:,} lines in {name}"
            for name, examples in zip(self.prefixes, self.examples, strict=True)
            for key, count in examples.unread_keys.items()
        ]
        lines |= {"bad": "; ".join(left_out)} if left_out else {}
        return lines | ({"unread": f"nothing reads {listed(unread)}"} if unread else {})

    def _per_conversation(self) -> np.ndarray:
        """Counts the examples of each conversation: int64."""
        owner = np.stack([self.source, self.lines])  # lines are numbered from 1
        begins = np.flatnonzero(np.diff(owner, prepend=-1).any(axis=0))
        return np.diff(begins, append=len(self.lines))

    def _tokens_with_loss(self) -> int:
        counts = (
            np.add.reduceat(examples.weights > 0, examples.ends - examples.lengths, dtype=np.int64)
            for examples in self.examples
        )
        return sum(int(c[self.number[self.source == i]].sum()) for i, c in enumerate(counts))

    def _placed(self, start: int, count: int) -> list[tuple[int, slice, int, slice]]:
        """Locates each example: (row of the batch, its columns, source, tokens of the source)."""
        placed = []
        for row in range(count):
            at = 0
            for example in self.epochs.items(start + row):
                length, source = int(self.lengths[example]), int(self.source[example])
                end = int(self.examples[source].ends[self.number[example]])
                placed.append((row, slice(at, at + length), source, slice(end - length, end)))
                at += length
        return placed


def _share(examples: ChatExamples, split: str, which: Which) -> range:
    """Selects the examples of `which` of a split; splits no conversation."""
    bounds = examples.bounds
    first, end = split_range(split, which, len(bounds) - 1)
    return range(int(bounds[first]), int(bounds[end]))


def open_conversations(
    config: RunConfig, tokenizer: str | Path | None, which: Which = "train"
) -> PackedConversations:
    """Opens the conversations of a config with its tokenizer, or with that of the initial weights.
    Raises MtcliError where there is none, or the data is wrong."""
    data = config.data
    spec = data.tokenizer or tokenizer
    if spec is None:
        hint = "name its folder, or start from a Hugging Face folder that has one: --init FOLDER"
        message = "conversations are read by a tokenizer, and none is named"
        raise wrong(message, hint, "data.tokenizer")
    loaded, path = load_tokenizer(spec), Path(spec).expanduser()
    folder = path if path.is_dir() else path.parent
    paths, field = data.train, "data.train"
    if which == "valid" and data.valid:
        paths, field = data.valid_words, "data.valid"
    try:
        template = None
        if data.chat_template:
            template = load_chat_template(folder if path.exists() else None, loaded.config)
        tokenize = ExampleTokenizer(
            loaded, template, config.batch.seq_len, data.skip_bad, data.loss_on
        )
        return PackedConversations(paths, config, tokenize, which, field)
    except OverLimit as limit:
        raise wrong(str(limit), limit.hint, "data.tokenizer") from None
