"""The inputs of a stage besides activations: a micro-batch's tokens, positions, labels, masks."""

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mtcli.core.config.model import ModelConfig
from mtcli.core.model.rope import RotaryTable, rotary_tables
from mtcli.core.model.slots import ROOM, SlotPass
from mtcli.core.parallel.attention_mask import AttentionMask, Documents, KernelMask, restarted
from mtcli.core.parallel.factory import Scale


@dataclass(frozen=True)
class KVCache:
    """The keys and values of the tokens read so far, by layer, for generation.

    They are views of `memory`, which has room for more tokens: a copy of a cache of n tokens for
    each new one would be n / 2 copies of every token.
    """

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    memory: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values [b, heads, s, head_dim]; returns those of all tokens so far."""
        if layer in self.layers:
            old = self.layers[layer]
            start, end = old[0].shape[2], old[0].shape[2] + k.shape[2]
            if layer not in self.memory or self.memory[layer][0].shape[2] < end:
                self.memory[layer] = _with_room(old[0], end), _with_room(old[1], end)
            memory = self.memory[layer]
            for target, new in zip(memory, (k, v), strict=True):
                target[:, :, start:end] = new
            k, v = memory[0][:, :, :end], memory[1][:, :, :end]
        self.layers[layer] = (k, v)
        return k, v

    def has_past(self, q: Tensor, k: Tensor) -> bool:
        """Whether queries attend to earlier tokens too."""
        return q.shape[2] < k.shape[2]

    def mask(self, masking: AttentionMask, q: Tensor, size: int) -> KernelMask:
        """The mask from the new tokens to all."""
        return masking.of_cached(q, size)

    def after(self, prefix: "KVCache") -> "KVCache":
        """Appends this cache's keys and values to those of the tokens before it."""
        layers = {
            layer: (torch.cat([prefix.layers[layer][0], k], 2),
                    torch.cat([prefix.layers[layer][1], v], 2))
            for layer, (k, v) in self.layers.items()
        }  # fmt: skip
        return KVCache(layers)


def _with_room(x: Tensor, tokens: int) -> Tensor:
    """New memory [b, heads, more than `tokens`, head_dim] that begins with x."""
    b, heads, size, width = x.shape
    memory = x.new_empty(b, heads, -(-(tokens + tokens // 2) // ROOM) * ROOM, width)
    memory[:, :, :size] = x
    return memory


@dataclass(frozen=True)
class Sentences:
    """The N sequences of a micro-batch that a head classifies, equal on every rank that shares it.
    There is one of M labels per sequence, or per N / M sequences that are the choices of a
    question."""

    rows: Tensor  # [N] int64: the first token among this rank's b * s; -1 on another cp rank
    labels: Tensor  # [M] int64
    weights: Tensor  # [M] float32, of the labels' losses


@dataclass(frozen=True)
class Inputs:
    """One micro-batch of b sequences of s tokens; T = b * s tokens, sequence by sequence.

    `positions` count within a sequence or document. `documents`, or `paths` of packed rows, say
    which tokens of a row belong together; each layer's visibility says how far a token attends
    within them. `numbers` are global token numbers, sample * seq_len + position over the run, which
    index every dropout mask; None is no dropout. `weights` multiply the labels' losses; None is 1.
    `padding` is True for padding tokens, which routers do not count; None is none. A head
    classifies each of `sentences`.
    """

    tokens: Tensor  # [b, s] int64
    positions: Tensor  # [b, s] int64
    labels: Tensor | None = None  # [b, s] int64
    weights: Tensor | None = None  # [b, s] float32
    padding: Tensor | None = None  # [b, s] bool
    numbers: Tensor | None = None  # [b, s] int64
    documents: Documents | None = None  # [b, s of full rows]; None is one of each row
    paths: Tensor | None = None  # [b, s, s] bool, True from a token to earlier ones on its path
    token_types: Tensor | None = None  # [b, s] int64; None is 0 each
    sentences: Sentences | None = None
    rotations: tuple[RotaryTable, ...] = ()  # by `layer_table` of model/rope.py
    cache: KVCache | SlotPass | None = None
    prefix: KVCache | None = None  # of one sequence that precedes each of the b; not extended
    aux_scale: Scale = 0.0  # gradient of one token's auxiliary loss; 0 where there is no backward

    @property
    def shape(self) -> tuple[int, int]:
        """(b, s)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def tensors(self) -> list[Tensor]:
        """The tensors that a training step reads, in a fixed order; fields of None are left out."""
        rows = None if self.documents is None else self.documents.rows
        optional = self.labels, self.weights, self.padding, self.numbers, rows
        given = (self.tokens, self.positions, *optional, *chain(*self.rotations))
        return [x for x in given if x is not None]

    def clone(self) -> "Inputs":
        """A copy of the inputs in new memory."""
        optional = self.labels, self.weights, self.padding, self.numbers
        labels, weights, padding, numbers = (None if x is None else x.clone() for x in optional)
        return replace(
            self,
            tokens=self.tokens.clone(),
            positions=self.positions.clone(),
            labels=labels,
            weights=weights,
            padding=padding,
            numbers=numbers,
            documents=self.documents and Documents(self.documents.rows.clone()),
            rotations=tuple(RotaryTable(*(x.clone() for x in pair)) for pair in self.rotations),
        )


def token_positions(documents: Tensor, model: ModelConfig) -> Tensor:
    """The position of each token in its document [b, s]. Padding counts as one more document; if
    longer than the context it stays at the last position."""
    return restarted(documents).clamp(max=model.max_seq_len - 1)


def make_inputs(
    model: ModelConfig,
    dtype: torch.dtype,
    tokens: Tensor,
    *,
    positions: Tensor | None = None,
    documents: Tensor | Documents | None = None,
    context: int | None = None,
    **fields: Any,
) -> Inputs:
    """The inputs of tokens [b, s], with positions 0 .. s - 1 by default, and their rotary tables.

    `documents` [b, s of full rows] restrict attention to a token's own document. Some scalings of
    rotary positions depend on `context`, by default the model's; it is 0 on a rank without blocks,
    which has no tables. `fields` are others of `Inputs`.
    """
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    context = model.max_seq_len if context is None else context
    turned = context > 0 and model.position == "rope"
    tables = rotary_tables(model, positions, dtype, context) if turned else ()
    apart = Documents(documents) if isinstance(documents, Tensor) else documents
    if (types := fields.get("token_types")) is not None:  # both texts have the only one
        fields["token_types"] = types.clamp(max=max(0, model.token_types - 1))
    return Inputs(tokens, positions, rotations=tables, documents=apart, **fields)
