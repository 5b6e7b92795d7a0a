"""Attention masks: which keys each query of a row attends to."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mtcli.kernels.attention.tiles import KeyRanges


@dataclass(frozen=True)
class AttentionMask:
    """Masks later keys with `causal`, and keys of other documents with `documents`.

    `documents` [b, s] integers, ascending along a row, are those of full rows on every context
    parallel rank: so the documents of another rank's keys need no exchange.
    """

    causal: bool = True
    documents: Tensor | None = None

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """bool [b or 1, 1, n, m] for positions in the row [n] and [m]; None masks nothing."""
        visible = None
        if self.documents is not None:
            same = self.documents[:, queries, None] == self.documents[:, None, keys]
            visible = same[:, None]
        if self.causal:
            past = queries[:, None] >= keys
            visible = past[None, None] if visible is None else visible & past
        return visible

    def spans(self, queries: Tensor, keys: Tensor) -> KeyRanges:
        """The same as an interval of the keys for each query; positions ascend."""
        if self.documents is None:
            first, end = torch.zeros_like(queries)[None], torch.full_like(queries, len(keys))[None]
        else:
            of_queries, of_keys = self.documents[:, queries], self.documents[:, keys].contiguous()
            first = torch.searchsorted(of_keys, of_queries)
            end = torch.searchsorted(of_keys, of_queries, right=True)
        if self.causal:
            end = torch.minimum(end, torch.searchsorted(keys, queries, right=True))
        return KeyRanges(first.int(), end.int())

    @cached_property
    def lengths(self) -> list[list[int]]:
        """The tokens of each document, row by row. Asked of one micro-batch by every layer."""
        assert self.documents is not None, "there are documents"
        rows = self.documents.cpu()
        return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in rows]


def restarted(documents: Tensor) -> Tensor:
    """Positions [b, s] that begin again at 0 with every document of `documents` [b, s]."""
    first = torch.searchsorted(documents, documents)  # ascending: the left end of its run
    return torch.arange(documents.shape[1], device=documents.device) - first
