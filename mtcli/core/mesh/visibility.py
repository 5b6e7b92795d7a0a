"""Which keys of its row a layer's queries attend to: a property of the layer, not of a step.

Context parallelism, KV caches, packed evaluation, FLOPs and planned seconds all read it here. Masks
of a step, such as of documents, are in parallel/attention_mask.py.

The first key of a query is `first_key`, of positions that count from the beginning of its text: it
may depend on where a query is, and not on its distance alone, as long as it ascends with the query.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from mtcli.core.config.model import ModelConfig


class Countable(Protocol):
    """A position, or a tensor of them."""

    def __sub__(self, other: Any, /) -> Any:
        """The distance from another."""


Positions = TypeVar("Positions", bound=Countable)


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

    @property
    def hides_early(self) -> bool:
        """Whether a query may attend to no key before its `first_key`; if not, that is 0."""
        return self.left is not None

    def first_key(self, query: Positions) -> Positions:
        """The first key that a query attends to; 0 or less where it attends to all before it."""
        first: Positions = query - (query if self.left is None else self.left)
        return first

    def sees_some(self, queries: PositionRange, keys: PositionRange) -> bool:
        """Whether any of the queries attends to any of the keys."""
        nearest = keys.first - queries.end + 1
        return self._shows_after(nearest) and self.first_key(queries.first) < keys.end

    def sees_all(self, queries: PositionRange, keys: PositionRange) -> bool:
        """Whether every query attends to every key."""
        furthest = keys.end - 1 - queries.first
        return self._shows_after(furthest) and self.first_key(queries.end - 1) <= keys.first

    def keys_of(self, queries: PositionRange, length: int) -> PositionRange:
        """The keys of a row of a length, from the first to the last that a query attends to."""
        first = max(0, self.first_key(queries.first))
        end = length if self.right is None else min(length, queries.end + self.right)
        return PositionRange(first, end)

    def kind(self, length: int, first: int = 0) -> Literal["all", "causal", "band"]:
        """The mask of `length` tokens from `first` on, among themselves: none, causal, or a
        band."""
        row = PositionRange(first, first + length)
        if self.right == 0 and self.first_key(row.end - 1) <= first:
            return "causal"
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
