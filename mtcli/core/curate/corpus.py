"""Joins all parts of a pass into one corpus: documents by number, and a mask of the live ones.

Number 0 is the first document of the first part. The numbering follows from the names and sizes of
the input files alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mtcli.core.curate.config import Stage
from mtcli.core.curate.hashing import Array
from mtcli.core.curate.parts import Files, Lines, Part
from mtcli.core.runtime.atomic_writes import atomic_file

Value = TypeVar("Value")
OPEN_PARTS = 64  # of which texts are read: a process may have 1,024 files open


class Removals(NamedTuple):
    """A table of the documents that a corpus stage removed, ascending by number; [removed] each."""

    removed: Array  # int64
    kept: Array  # int64: the one that stays instead, or -1
    root: Array  # int64: the member of their cluster with the smallest id, or -1
    jaccard: Array  # float64: of the removed and the kept; NaN where there is none
    reason: Array  # int64: an index of the stage's reasons

    @staticmethod
    def load(path: Path) -> "Removals":
        """Reads what `save` wrote."""
        with np.load(path) as arrays:
            return Removals(*(arrays[name] for name in Removals._fields))

    def rows(self, chosen: Array) -> "Removals":
        """Selects rows by index or mask."""
        return Removals(*(column[chosen] for column in self))

    def save(self, path: Path) -> None:
        """Writes a file that appears whole or not at all."""
        with atomic_file(path) as temporary:
            np.savez(temporary, **self._asdict())


CORPUS_REASONS: dict[str, tuple[str, ...]] = {
    "exact": ("same text",),
    "fuzzy": ("near duplicate",),
    "decontaminate": ("too many pieces", "nothing left"),
}


class ChangedLines(NamedTuple):
    """A part's documents with new lines: their rows, and the files of those lines. A document that
    was cut apart has several lines."""

    rows: Array
    files: Files


class Slice(NamedTuple):
    """A part of the corpus: its mask of alive documents, and its first document's number."""

    part: Part
    alive: Array
    first: int

    @property
    def numbers(self) -> Array:
        """The numbers of the documents that are alive."""
        return self.first + np.flatnonzero(self.alive)


class Corpus:
    """The parts of a pass; those of an older corpus come last and lose no document."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        counts = [part.count for part in self.parts]
        self.bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.alive = np.ones(self.size, bool)
        self._open: OrderedDict[int, Lines] = OrderedDict()
        self.num_new = int(sum(part.count for part in self.parts if not part.against))

    @property
    def size(self) -> int:
        """The number of documents, alive or not."""
        return int(self.bounds[-1])

    def slice(self, index: int) -> Slice:
        first, end = self.bounds[index : index + 2].tolist()
        return Slice(self.parts[index], self.alive[first:end], first)

    def new_slices(self) -> dict[int, Slice]:
        """Returns the slices of the parts that are not of an older corpus, by part."""
        return {i: self.slice(i) for i, part in enumerate(self.parts) if not part.against}

    def column(self, name: str, index: int | None = None) -> Array:
        """Concatenates an array over all parts [size, ...], or row `index` of one that is stored by
        column."""
        # Copies, a part at a time: an array that is mapped holds a file open.
        arrays = (part.array(name) for part in self.parts)
        copies = [np.array(array if index is None else array[index]) for array in arrays]
        return np.concatenate(copies) if copies else np.zeros(0, np.uint64)

    def take(self, name: str, numbers: Array) -> Array:
        """Gathers the rows of an array for some documents, in their order."""
        owners = self.owners(numbers)
        order = np.argsort(owners, kind="stable")
        bounds = np.searchsorted(owners[order], np.arange(len(self.parts) + 1))
        taken: Array | None = None
        for index in np.unique(owners):
            positions = order[bounds[index] : bounds[index + 1]]
            rows = self.parts[index].array(name)[numbers[positions] - self.bounds[index]]
            if taken is None:
                taken = np.empty((len(numbers), *rows.shape[1:]), rows.dtype)
            taken[positions] = rows
        return np.zeros(0) if taken is None else taken

    def owners(self, numbers: Array) -> Array:
        """Returns the part that holds each document."""
        return np.searchsorted(self.bounds, numbers, side="right") - 1

    def of_rows(
        self, numbers: Array, read: Callable[[Part], Callable[[int], Value]]
    ) -> list[Value]:
        """Returns `read(part)(row)` for each document; opens one part at a time."""
        owners = self.owners(numbers)
        order, rows = np.argsort(owners, kind="stable"), numbers - self.bounds[owners]
        columns = owners[order].tolist(), order.tolist(), rows[order].tolist()
        taken: list[Any] = [None] * len(numbers)
        for index, some in groupby(zip(*columns, strict=True), itemgetter(0)):
            of_row = read(self.parts[index])
            for _, position, row in some:
                taken[position] = of_row(row)
        return taken

    def keys(self, numbers: Array) -> list[bytes]:
        """Returns the keys of some documents."""
        return self.of_rows(numbers, lambda part: part.keys().__getitem__)

    def sources(self, numbers: Array) -> list[str]:
        """Returns the sources of some documents."""

        def of_part(part: Part) -> Callable[[int], str]:
            names, source_ids = part.summary["sources"], part.array("sources")
            return lambda row: names[source_ids[row]]

        return self.of_rows(numbers, of_part)

    def text(self, number: int) -> str:
        """Reads a document's text."""
        index = int(self.owners(np.array([number]))[0])
        lines = self._open.pop(index, None) or self.parts[index].lines
        self._open[index] = lines  # the last one now
        if len(self._open) > OPEN_PARTS:
            self._open.popitem(last=False)
        return lines.text(int(number - self.bounds[index]))

    def removals(self, clusters: Sequence[Array], priority: Sequence[str]) -> Removals:
        """Decides which document of each cluster stays: one of the older corpus, else of the best
        source, else the one with the smallest id. Jaccards are left at 1."""
        members = np.concatenate([np.zeros(0, np.int64), *clusters])
        names = list(zip(self.keys(members), self.sources(members), strict=True))
        return table_of(decide(clusters, names, self.num_new, priority))


def decide(
    clusters: Sequence[Array],
    names: Sequence[tuple[bytes, str]],
    num_new: int,
    priority: Sequence[str],
) -> Array:
    """Returns (removed, kept, root) [removed, 3], from clusters and the (key, source) of every
    member."""
    ranks = {source: rank for rank, source in enumerate(priority)}
    removed: list[tuple[int, int, int]] = []
    start = 0
    for cluster in clusters:
        stop = start + len(cluster)
        named = sorted(
            (key, source, number)
            for (key, source), number in zip(names[start:stop], cluster.tolist(), strict=True)
        )
        root = named[0][2]
        best = min(named, key=lambda m: (m[2] < num_new, ranks.get(m[1], len(ranks))))[2]
        new = (number for number in cluster.tolist() if number < num_new)
        removed += [(number, best, root) for number in new if number != best]
        start = stop
    return np.array(removed, np.int64).reshape(-1, 3)


def table_of(removed: Array) -> Removals:
    """Sorts (removed, kept, root) [removed, 3] into Removals with Jaccards of 1."""
    table = removed[np.argsort(removed[:, 0], kind="stable")]
    ones = np.ones(len(table))
    numbers, stays, root = table.T.copy()
    return Removals(numbers, stays, root, ones, ones.astype(np.int64) * 0)


class Found(NamedTuple):
    """The tasks' n-grams that occur in a corpus, and those spared as common phrases."""

    ngrams: dict[str, list[str]]  # by task
    spared: dict[str, list[dict[str, Any]]]  # by task: items' texts and n-grams


class PassResult(NamedTuple):
    """The outcome of a pass: its corpus, and by stage or part what corpus stages removed and
    cut."""

    corpus: Corpus
    removals: dict[Stage, Removals]
    changed: dict[int, ChangedLines]
    entered: dict[Stage, Array]  # who was alive before each corpus stage
    found: Found | None = None  # of the tasks' n-grams
