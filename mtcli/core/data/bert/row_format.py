"""Defines the rows of an encoder: several sequences each, with the labels of its head."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from mtcli.core.config.model import MASKED_SHARE, SEQUENCES
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.bert.special_tokens import SpecialTokens
from mtcli.core.data.loader import RunData


class Segments(NamedTuple):
    """A sequence: [CLS] first [SEP], or [CLS] first [SEP] second [SEP] with token types 0 and 1."""

    first: np.ndarray  # ids
    second: np.ndarray | None = None

    @property
    def size(self) -> int:
        """The tokens of the sequence with its special ones."""
        return len(self.first) + (2 if self.second is None else 3 + len(self.second))


class EncoderRows(NamedTuple):
    """Rows [n, S] of N sequences, with labels of tokens and of sequences.

    Each of the M sequence labels is of one sequence, or of all choices of a question.
    """

    tokens: np.ndarray  # int64 [n, S], padded at the end
    token_types: np.ndarray  # int64 [n, S]
    documents: np.ndarray  # int32 [n, S]: sequences of a row count from 0; padding is the last
    labels: np.ndarray  # int64 [n, S]
    weights: np.ndarray  # float32 [n, S]: of predicted tokens' losses, else 0
    firsts: np.ndarray  # int64 [N]: row * S + position of each sequence's first token
    classes: np.ndarray  # int64 [M]
    class_weights: np.ndarray  # float32 [M]

    @property
    def padding(self) -> np.ndarray:
        """The tokens that fill rows up behind their sequences: bool [n, S]."""
        count, size = self.documents.shape
        sequences = np.bincount(self.firsts // size, minlength=count)
        return self.documents >= sequences[:, None]


class EncoderBatches(RunData, Protocol):
    """The rows of an encoder's data, by global sample."""

    def rows(self, start: int, count: int) -> EncoderRows:
        """Returns rows start .. start + count - 1."""


class CountedRows(EncoderBatches):
    """Rows full of tokens 0, 1, 2, ... for profiles, with one sequence each, or four choices, and
    as many tokens to predict in every shard."""

    def __init__(self, config: RunConfig, num_samples: int) -> None:
        self.model, self.size, self.num_samples = config.model, config.batch.seq_len, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def rows(self, start: int, count: int) -> EncoderRows:
        """Builds rows start .. start + count - 1."""
        ids = np.arange(start * self.size, (start + count) * self.size, dtype=np.int64)
        tokens = ids.reshape(count, -1) % self.model.vocab_size
        parts = SEQUENCES.get(self.model.head, 1)
        documents = np.broadcast_to(np.arange(self.size) * parts // self.size, tokens.shape)
        starts = np.arange(parts) * self.size // parts
        firsts = (np.arange(count)[:, None] * self.size + starts).flatten()
        # of 20 in turn 3, no two beside each other
        weights = (ids * 3 % 20 < 20 * MASKED_SHARE) * np.float32(self.model.head == "mlm")
        return EncoderRows(
            tokens=tokens,
            token_types=np.zeros_like(tokens),
            documents=documents.astype(np.int32),
            labels=tokens,
            weights=weights.reshape(tokens.shape).astype(np.float32),
            firsts=firsts,
            classes=np.zeros(count, np.int64),
            class_weights=np.ones(count, np.float32),
        )


def lay_out(rows: Sequence[Sequence[Segments]], size: int, special: SpecialTokens) -> EncoderRows:
    """Lays sequences into rows of `size` tokens, without tokens to predict."""
    count = len(rows)
    tokens = np.full((count, size), special.pad, np.int64)
    types, documents = np.zeros((count, size), np.int64), np.zeros((count, size), np.int32)
    firsts = []
    for number, sequences in enumerate(rows):
        at = 0
        for index, (first, second) in enumerate(sequences):
            firsts.append(number * size + at)
            parts: list[ArrayLike] = [[special.cls], first, [special.sep]]
            begin = at + len(first) + 2
            if second is not None:
                parts += [second, [special.sep]]
            flat: np.ndarray = np.concatenate(parts)
            end = at + len(flat)
            assert end <= size, f"{end} tokens in a row of {size}"
            tokens[number, at:end] = flat
            types[number, begin:end] = 1
            documents[number, at:end] = index
            at = end
        documents[number, at:] = len(sequences)
    nothing = np.zeros((count, size), np.float32)
    none = np.zeros(0, np.int64)
    return EncoderRows(
        tokens, types, documents, tokens, nothing, np.array(firsts, np.int64), none, none
    )
