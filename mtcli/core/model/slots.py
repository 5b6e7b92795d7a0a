"""Keys and values of texts that are generated together: a slot of memory for each text.

b texts of a forward pass, s new tokens of each, m keys; a layer keeps heads of a width.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtcli.core.mesh.visibility import PositionRange, Visibility
from mtcli.core.parallel.attention_mask import AttentionMask, KernelMask

ROOM = 128  # tokens: memory grows by half, to multiples of these


@dataclass
class Slots:
    """The keys and values of texts, by layer: two of [slots, heads, room, width].

    Memory is zero at first: a masked key has weight 0, but 0 * NaN would be NaN.
    """

    count: int
    longest: int  # tokens of a text: memory never has room for more
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, layer: int, like: tuple[Tensor, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """A layer's memory with room for `size` tokens; `like` are keys and values [b, heads, s,
        width]."""
        old = self.layers.get(layer)
        if old is None or old[0].shape[2] < size:
            assert size <= self.longest, (size, self.longest)
            room = -(-(size if old is None else size + size // 2) // ROOM) * ROOM
            room = min(room, self.longest)
            new = [x.new_zeros(self.count, x.shape[1], room, x.shape[3]) for x in like]
            for target, source in zip(new, old or (), strict=False):
                target[:, :, : source.shape[2]] = source
            self.layers[layer] = (new[0], new[1])
        return self.layers[layer]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first tokens of a slot to another."""
        if source != target:
            for pair in self.layers.values():
                for memory in pair:
                    memory[target, :, :tokens] = memory[source, :, :tokens]


@dataclass(frozen=True, eq=False)
class SlotPass:
    """A forward pass over new tokens of the texts in some slots.

    As a `KVCache` it has keys and values of earlier tokens. Rows may be filled up behind their
    tokens: what is written there is never read, as later tokens of the text replace it first.
    """

    slots: Slots
    rows: Tensor  # [b] int64: the slot of each text
    positions: Tensor  # [b, s] int64
    size: int  # m: the last position of any text, and 1
    is_first: bool  # all texts begin here, so that none has earlier tokens
    is_even: bool  # each text has one new token, all at one position
    is_leading: bool  # the slots are 0 .. b - 1, and their memory is read in place
    masks: dict[Visibility, KernelMask] = field(default_factory=dict)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values [b, heads, s, width]; returns those of all tokens [b, heads, m,
        width]."""
        memory = self.slots.of(layer, (k, v), self.size)
        for target, new in zip(memory, (k, v), strict=True):
            if self.is_leading and self.is_even:
                target[: len(k), :, self.size - 1 : self.size] = new
            else:
                target[self.rows[:, None], :, self.positions] = new.transpose(1, 2)
        if self.is_first:
            return k, v
        if self.is_leading:
            return memory[0][: len(k), :, : self.size], memory[1][: len(k), :, : self.size]
        return memory[0][self.rows, :, : self.size], memory[1][self.rows, :, : self.size]

    def has_past(self, q: Tensor, k: Tensor) -> bool:
        """Whether queries attend to earlier tokens too."""
        return not self.is_first

    def mask(self, masking: AttentionMask, q: Tensor, size: int) -> KernelMask:
        """The mask from the new tokens to all; computed once for all layers of a visibility."""
        visibility = masking.visibility
        if visibility not in self.masks:
            at = PositionRange(size - 1, size)
            sees_all = self.is_even and visibility.sees_all(at, PositionRange(0, size))
            self.masks[visibility] = None if sees_all else masking.of_texts(q, self.positions, size)
        return self.masks[visibility]


def slot_pass(
    slots: Slots, rows: list[int], starts: list[int], tokens: int, device: torch.device
) -> SlotPass:
    """A pass over `tokens` new tokens of each text, from its position in `starts` on."""
    first = torch.tensor(starts, device=device)
    positions = first[:, None] + torch.arange(tokens, device=device)
    is_even = tokens == 1 and min(starts) == max(starts)
    return SlotPass(
        slots,
        torch.tensor(rows, device=device),
        positions,
        max(starts) + tokens,
        max(starts) == 0,
        is_even,
        rows == list(range(len(rows))),
    )
