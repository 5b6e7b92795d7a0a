"""Defines the interface of models that score tokens: rows in, log-probabilities out.

Shapes: B rows, S slots in a row, N scored predictions.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # tasks are read and checked before torch is loaded
    from torch import Tensor


class ScoreBatch(NamedTuple):
    """The batch of one forward pass. Requests may share a row; `mask` then separates them.

    `rows` may name one slot several times with different targets: the first tokens of several
    endings share the last slot of their context. With a mask S may exceed the model's longest
    sequence; positions never do.
    """

    tokens: "Tensor"  # [B, S] int64
    positions: "Tensor"  # [B, S] int64: position of each token in its own sequence
    mask: "Tensor | None"  # [B, S, S] bool, True = may attend; None = plain causal
    rows: "Tensor"  # [N] int64 into the flat [B*S] tokens: whose next-token prediction is scored
    targets: "Tensor"  # [N] int64 target ids
    padding: "Tensor | None" = None  # [B, S] bool, True fills a row up; None = nowhere


class Scorer(Protocol):
    """The interface of a language model for evaluation."""

    @property
    def max_seq_len(self) -> int:
        """The longest context of the model."""
        ...

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, without padding."""
        ...

    def read(self, tokens: "Tensor", after: Any = None) -> Any:
        """Reads tokens [P], a prefix of many rows, once; `score` takes the result as `after`.

        `after` is the prefix that precedes these tokens.
        """
        ...

    def score(self, batch: ScoreBatch, after: Any = None) -> "tuple[Tensor, Tensor]":
        """Scores each target: log-probability [N] float32, and whether it is the argmax [N] bool.

        Each row follows the prefix `after`. Equal on every rank.
        """
        ...
