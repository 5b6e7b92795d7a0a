"""Which keys of its row a layer's queries attend to: a fact of the layer, not of a step.

Context parallelism, KV caches, packed evaluation, FLOPs and planned seconds all read it here. What
belongs to a step, such as the documents of its rows, is in parallel/attention_mask.py.
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
    """Shows a query at position i the keys at i - `left` .. i + `right`; None is no limit.

    FlashAttention's window_size. Causal attention has `right` 0, and a causal window of W keys,
    the query's own among them, also has `left` W - 1.
    """

    left: int | None = None
    right: int | None = 0

    def sees_some(self, queries: PositionRange, keys: PositionRange) -> bool:
        """Whether any of the queries attends to any of the keys."""
        nearest, furthest = keys.first - queries.end + 1, keys.end - 1 - queries.first
        return self._shows_after(nearest) and self._shows_before(-furthest)

    def sees_all(self, queries: PositionRange, keys: PositionRange) -> bool:
        """Whether each of the queries attends to each of the keys."""
        nearest, furthest = keys.first - queries.end + 1, keys.end - 1 - queries.first
        return self._shows_after(furthest) and self._shows_before(-nearest)

    def keys_of(self, queries: PositionRange, length: int) -> PositionRange:
        """The keys of a row of a length, from the first to the last that a query attends to."""
        first = 0 if self.left is None else max(0, queries.first - self.left)
        end = length if self.right is None else min(length, queries.end + self.right)
        return PositionRange(first, end)

    def kind(self, length: int) -> Literal["all", "causal", "band"]:
        """Names the mask of a row of a length: nothing, what comes after the query, or a band."""
        if self.right == 0 and self._shows_before(length - 1):
            return "causal"
        row = PositionRange(0, length)
        return "all" if self.sees_all(row, row) else "band"

    def mean_keys(self, seq_len: int) -> float:
        """Mean number of keys that a query of a row attends to; a causal row has half its keys."""
        late = 0 if self.right is None else max(0, seq_len - self.right)
        early = 0 if self.left is None else max(0, seq_len - self.left - 1)
        # Two triangles of the square of scores are hidden.
        return seq_len - (late * late + early * early) / (2 * max(1, seq_len))

    def widest(self, seq_len: int) -> int:
        """Keys of a row from the first to the last that a query attends to, at most; a causal
        limit does not count, as each key of a row is some query's last."""
        if self.left is None or self.right is None:
            return seq_len
        return min(seq_len, self.left + 1 + self.right)

    def _shows_after(self, distance: int) -> bool:
        return self.right is None or distance <= self.right

    def _shows_before(self, distance: int) -> bool:
        return self.left is None or distance <= self.left


def layer_visibility(model: ModelConfig, layer: int) -> Visibility:
    """What queries of a layer, numbered over all stages, attend to."""
    window = model.layer_window(layer)
    if model.causal:
        return Visibility(window - 1 if window else None, 0)
    return Visibility(window or None, window or None)


@cache
def mean_keys(model: ModelConfig, seq_len: int, full_square: bool = False) -> float:
    """Mean number of keys that a query attends to, over rows and layers; with `full_square` those
    of the scores that are computed where a causal half is not left out."""
    layers = [layer_visibility(model, layer) for layer in range(model.num_layers)]
    keys = [v.widest(seq_len) if full_square else v.mean_keys(seq_len) for v in layers]
    return sum(keys) / len(keys)
