"""Which keys of its row a layer's queries attend to: a property of the layer, not of a step.

Context parallelism, KV caches, packed evaluation, FLOPs and planned seconds all read it here. Masks
of a step, such as of documents, are in parallel/attention_mask.py.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from mtcli.core.config.model import ModelConfig


class PositionRange(NamedTuple):
    """Consecutive positions of a row: `first` .. `end` - 1."""

    first: int
    end: int


@dataclass(frozen=True)
class Visibility:
    """A query at position i attends to keys i - `left` .. i + `right`; None is no limit.

    As FlashAttention's window_size. Causal attention has `right` 0; a causal window of W keys, the
    query's own included, also has `left` W - 1.
    """

    left: int | None = None
    right: int | None = 0

    def sees_some(self, queries: PositionRange, keys: PositionRange) -> bool:
        """Whether any of the queries attends to any of the keys."""
        nearest, furthest = keys.first - queries.end + 1, keys.end - 1 - queries.first
        return self._shows_after(nearest) and self._shows_before(-furthest)

    def sees_all(self, queries: PositionRange, keys: PositionRange) -> bool:
        """Whether every query attends to every key."""
        nearest, furthest = keys.first - queries.end + 1, keys.end - 1 - queries.first
        return self._shows_after(furthest) and self._shows_before(-nearest)

    def keys_of(self, queries: PositionRange, length: int) -> PositionRange:
        """The keys of a row of a length, from the first to the last that a query attends to."""
        first = 0 if self.left is None else max(0, queries.first - self.left)
        end = length if self.right is None else min(length, queries.end + self.right)
        return PositionRange(first, end)

    def kind(self, length: int) -> Literal["all", "causal", "band"]:
        """The mask of a row of `length` tokens: none, causal, or a band."""
        if self.right == 0 and self._shows_before(length - 1):
            return "causal"
        row = PositionRange(0, length)
        return "all" if self.sees_all(row, row) else "band"

    def mean_keys(self, seq_len: int) -> float:
        """The mean number of keys per query of a row; a causal row has half its keys."""
        late = 0 if self.right is None else max(0, seq_len - self.right)
        early = 0 if self.left is None else max(0, seq_len - self.left - 1)
        # Two triangles of the square of scores are hidden.
        return seq_len - (late * late + early * early) / (2 * max(1, seq_len))

    def widest(self, seq_len: int) -> int:
        """The widest span of keys that a query of a row attends to; a causal limit does not reduce
        it, as the last query sees all keys."""
        if self.left is None or self.right is None:
            return seq_len
        return min(seq_len, self.left + 1 + self.right)

    def _shows_after(self, distance: int) -> bool:
        return self.right is None or distance <= self.right

    def _shows_before(self, distance: int) -> bool:
        return self.left is None or distance <= self.left


def layer_visibility(model: ModelConfig, layer: int) -> Visibility:
    """The visibility of a layer, numbered over all stages."""
    window = model.layer_window(layer)
    if model.causal:
        return Visibility(window - 1 if window else None, 0)
    return Visibility(window or None, window or None)


@cache
def mean_keys(model: ModelConfig, seq_len: int, full_square: bool = False) -> float:
    """The mean number of keys per query, over rows and layers; with `full_square` also the masked
    half of causal layers."""
    layers = [layer_visibility(model, layer) for layer in range(model.num_layers)]
    keys = [v.widest(seq_len) if full_square else v.mean_keys(seq_len) for v in layers]
    return sum(keys) / len(keys)
