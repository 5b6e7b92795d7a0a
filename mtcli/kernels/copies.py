"""Copies of tokens sorted by expert: how many each expert has, and in which row each one lies.

T tokens, k experts of each, E experts; C copies that are kept, in N rows sorted by expert and
within one by token. With a `capacity` above 0 every expert has that many rows, the last zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Copies(NamedTuple):
    """How copies are sorted: `order` is for torch's functions, `places` for our kernels."""

    counts: Tensor  # [E] int64: the kept copies of each expert
    top_k: int
    capacity: int
    order: Tensor | None  # [C] the copies, of T * k, in the order of their rows
    places: Tensor | None  # [T, k] the row of each copy, -1 of a dropped one

    @property
    def rows(self) -> Tensor:
        """[E] int64: the rows of each expert, with those of zeros."""
        return torch.full_like(self.counts, self.capacity) if self.capacity else self.counts

    @property
    def padded_places(self) -> Tensor | None:
        """[C] int64: the row of each copy in `order`; None where rows are copies."""
        counts, capacity = self.counts, self.capacity
        if not capacity:
            return None
        assert int(counts.max()) <= capacity, f"{int(counts.max())} rows of {capacity}"
        starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        within = torch.arange(int(counts.sum()), device=counts.device) - starts
        experts = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        return experts * capacity + within
