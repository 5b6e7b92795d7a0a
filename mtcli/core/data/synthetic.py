"""Samples without data: for profiles and CPU calibration, whose work is that of any text."""

import numpy as np

from mtcli.core.data.loader import SampleId


class CountedTokens:
    """Samples of tokens 0, 1, 2, ..., each one document; read as `loader.Batches` are."""

    def __init__(self, seq_len: int, vocab_size: int, num_samples: int) -> None:
        self.seq_len, self.vocab_size, self.num_samples = seq_len, vocab_size, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, start: int, count: int) -> np.ndarray:
        """Samples start ... start + count - 1: int64 [count, seq_len + 1]."""
        first = np.arange(start, start + count, dtype=np.int64)[:, None] * self.seq_len
        return (first + np.arange(self.seq_len + 1)) % self.vocab_size

    def documents(self, start: int, count: int) -> np.ndarray:
        """Each sample is one document: int32 zeros [count, seq_len + 1]."""
        return np.zeros((count, self.seq_len + 1), np.int32)

    def loss_weights(self, start: int, count: int) -> None:
        """None: every token's loss weighs 1."""

    def sample_ids(self, start: int, count: int) -> list[SampleId]:
        """None: these come from no data set."""
        return []
