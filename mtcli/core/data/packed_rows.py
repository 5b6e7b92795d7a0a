"""Fills rows with sequences instead of padding, and numbers the rows of all epochs.

Items (sentences, or the sequences of an example) are laid into rows in shuffled order; a row ends
where the next item does not fit. Which items a row has depends on the data, the row's length, the
seed and the epoch's number alone, so a longer run begins with the same rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Epoch(NamedTuple):
    """The rows of an epoch: row i has items[starts[order[i]] : starts[order[i] + 1]]."""

    items: np.ndarray  # int64 [n], every item once
    starts: np.ndarray  # int64 [rows + 1]
    order: np.ndarray  # int64 [rows]

    def row(self, number: int) -> np.ndarray:
        """The items of a row: int64."""
        first = self.order[number]
        return self.items[self.starts[first] : self.starts[first + 1]]


def row_starts(costs: np.ndarray, opening: np.ndarray, size: int) -> np.ndarray:
    """Finds which items begin a row of at most `size` tokens: int64 [rows + 1], the last one n.

    `costs` [n] are tokens of each item, and `opening` [n] more where it begins a row. Every item
    fits in a row of its own.
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
    """The rows of all epochs in order, each epoch shuffled by (seed, its number)."""

    def __init__(self, epoch: Callable[[np.random.RandomState], Epoch], seed: int) -> None:
        """`epoch` lays all items into rows, by a generator of random numbers."""
        self._build, self._seed = epoch, seed
        self._ends: list[int] = []  # of the epochs so far, in rows
        self._current = (-1, Epoch(*(np.empty(0, np.int64),) * 3))

    def __getitem__(self, sample: int) -> np.ndarray:
        """The items of the row that comes after `sample` others: int64."""
        while not self._ends or sample >= self._ends[-1]:
            rows = len(self._epoch(len(self._ends)).order)
            self._ends.append(rows + (self._ends[-1] if self._ends else 0))
        number = int(np.searchsorted(self._ends, sample, side="right"))
        return self._epoch(number).row(sample - (self._ends[number - 1] if number else 0))

    def rows_of_epoch(self, number: int) -> int:
        """How many rows an epoch has: it depends on its order."""
        return len(self._epoch(number).order)

    def _epoch(self, number: int) -> Epoch:
        if self._current[0] != number:
            random = np.random.RandomState([self._seed, number])
            self._current = (number, self._build(random))
        return self._current[1]
