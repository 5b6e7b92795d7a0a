"""Attention masks of a layer: its `Visibility`, restricted to the documents of a step's rows.

A layer's `Visibility` says how far a query sees. A step restricts that to documents, to paths of
packed rows, or to tokens in a cache. b rows of s tokens, n queries, m keys, by their positions in
the row.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mtcli.core.mesh.visibility import PositionRange, Visibility
from mtcli.kernels.attention.tiles import KeyRanges
from mtcli.kernels.attention.varlen import PackedDocuments
from mtcli.kernels.triton_launch import runs_triton

KernelMask = Tensor | KeyRanges | None  # as kernels/attention/attention.py takes it


@dataclass(frozen=True, eq=False)
class Documents:
    """The document of each token: integers `rows` [b, s], ascending along a row.

    Every context parallel rank has them for full rows, so that the documents of another rank's keys
    need no exchange. `packed` has them as the host knew them, where a kernel may take them so.
    """

    rows: Tensor
    packed: PackedDocuments | None = None

    @cached_property
    def lengths(self) -> list[list[int]]:
        """The tokens of each document, row by row; computed once for all layers."""
        rows = self.rows.cpu()
        return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in rows]


@dataclass(frozen=True)
class AttentionMask:
    """Masks keys that a layer's `visibility` hides, and keys of other `documents`; scores of the
    rest have a soft `cap`, or none where it is 0, and `sinks` [b, h] of this rank's heads join
    their softmaxes."""

    visibility: Visibility
    documents: Documents | None = None
    cap: float = 0.0
    sinks: Tensor | None = None

    @property
    def packed(self) -> PackedDocuments | None:
        """The documents for a kernel that takes no cap and no sinks."""
        plain = self.cap == 0.0 and self.sinks is None
        return self.documents.packed if plain and self.documents is not None else None

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """The mask bool [b or 1, 1, n, m] between positions [n] and [m]; None masks nothing."""
        visible = self._visible(queries[:, None], keys)
        if self.documents is None:
            return None if visible is None else visible[None, None]
        of_queries, of_keys = (self.documents.rows[:, at] for at in (queries, keys))
        same = (of_queries[:, :, None] == of_keys[:, None])[:, None]
        return same if visible is None else same & visible

    def spans(self, queries: Tensor, keys: Tensor) -> KeyRanges:
        """The interval of keys that each query attends to; keys ascend, and queries too where there
        is a backward."""
        if self.documents is None:
            first, end = torch.zeros_like(queries)[None], torch.full_like(queries, len(keys))[None]
        else:
            rows = self.documents.rows
            of_queries, of_keys = rows[:, queries], rows[:, keys].contiguous()
            first = torch.searchsorted(of_keys, of_queries)
            end = torch.searchsorted(of_keys, of_queries, right=True)
        if self.visibility.hides_early:
            nearest = self.visibility.first_key(queries)
            first = torch.maximum(first, torch.searchsorted(keys, nearest))
        right = self.visibility.right
        if right is not None:
            last = queries + right if right else queries
            end = torch.minimum(end, torch.searchsorted(keys, last, right=True))
        return KeyRanges(first.int(), end.int())

    def between(self, like: Tensor, queries: Tensor, keys: Tensor) -> Tensor | KeyRanges | None:
        """The mask between positions, in the form that the attention kernel for `like` takes."""
        return self.spans(queries, keys) if runs_triton(like) else self.mask(queries, keys)

    def of_rows(self, q: Tensor, first: int = 0) -> tuple[bool, KernelMask]:
        """(causal, mask) of rows q [b, h, s, d] among themselves, whose tokens are at `first` and
        after."""
        size = q.shape[2]
        kind = self.visibility.kind(size, first)
        if self.documents is None and kind != "band":
            return kind == "causal", None
        positions = torch.arange(first, first + size, device=q.device)
        return False, self.between(q, positions, positions)

    def of_paths(self, paths: Tensor, positions: Tensor) -> Tensor:
        """The mask bool [b, 1, s, s] of packed rows: `paths` [b, s, s] is True from a token to the
        tokens before it on its path, and `positions` [b, s] count along paths."""
        if not self.visibility.hides_early:
            return paths[:, None]
        first = self.visibility.first_key(positions)
        return (paths & (positions[:, None] >= first[:, :, None]))[:, None]

    def of_cached(self, q: Tensor, size: int) -> KernelMask:
        """The mask from the last n tokens of a sequence, q [b, h, n, d], to all of its `size`
        tokens."""
        assert self.documents is None, "a cache is of one sequence in each row"
        first = size - q.shape[2]
        if self.visibility.sees_all(PositionRange(first, size), PositionRange(0, size)):
            return None
        positions = torch.arange(size, device=q.device)
        return self.between(q, positions[first:], positions)

    def of_texts(self, q: Tensor, positions: Tensor, size: int) -> KernelMask:
        """The mask from tokens at `positions` [b, s] of texts, q [b, h, s, d], to the `size` keys
        of each."""
        assert self.documents is None, "a slot is of one text"
        if runs_triton(q):
            first = self.visibility.first_key(positions).clamp(0)
            return KeyRanges(first.int(), (positions + 1).int())
        mask = self._visible(positions[:, :, None], torch.arange(size, device=q.device))
        assert mask is not None, "texts are causal"
        return mask[:, None]

    def of_prefix(self, q: Tensor, positions: Tensor, size: int) -> KernelMask:
        """The mask from rows [b, s], concatenated in q [1, h, b * s, d], to the `size` tokens of a
        prefix that precedes every row."""
        assert self.documents is None, "rows that follow a prefix are of one sequence each"
        if self.visibility.sees_all(
            PositionRange(size, size + positions.shape[1]), PositionRange(0, size)
        ):
            return None
        keys = torch.arange(size, device=q.device)
        return self.between(q, positions.flatten(), keys)

    def _visible(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """The layer's own mask, for positions that broadcast; None where it hides no key."""
        right = self.visibility.right
        visible = None if right is None else keys <= (queries + right if right else queries)
        if not self.visibility.hides_early:
            return visible
        near = keys >= self.visibility.first_key(queries)
        return near if visible is None else visible & near


def document_starts(rows: np.ndarray) -> tuple[np.ndarray, int]:
    """(`PackedDocuments.starts`, the tokens of the longest one) of documents [b, s] on the host."""
    is_first = np.ones(rows.shape, bool)
    is_first[:, 1:] = rows[:, 1:] != rows[:, :-1]
    found = np.flatnonzero(is_first)
    starts = np.full((1 << (len(found) - 1).bit_length()) + 1, rows.size, np.int32)
    starts[: len(found)] = found
    return starts, int(np.diff(starts).max())


def restarted(documents: Tensor) -> Tensor:
    """Positions [b, s] that restart at 0 in each document of `documents` [b, s]."""
    first = torch.searchsorted(documents, documents)  # ascending: the left end of its run
    return torch.arange(documents.shape[1], device=documents.device) - first
