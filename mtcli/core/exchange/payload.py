"""Lays out what `local` and `diloco` send compressed: the sizes of payloads.

Values lie in rows that have scales of their own: blocks of consecutive ones, or the largest of each
chunk. The indices of these are in Elias and Fano's code (1974): low bits as they are, and a bitmap
in which the i-th bit that is set lies at i plus the high bits. With 1 of 64 that is 8 bits an
index, where 12 would number a chunk and 7.4 is the least.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple
from zlib import crc32

from mtcli.core.config.sync import SyncConfig

BLOCK = 256  # values that share a scale
CHUNK = 4096  # of which the largest are sent (SparseLoCo, arXiv:2508.15706, section 3)
SCALE_BYTES = 4
COUNT_BYTES = 4  # a float32 at the end of a payload: how many replicas are in it

Range = tuple[int, int]  # (offset, length) in a flat tensor


class Payload(NamedTuple):
    """The compressed form of one flat tensor."""

    rows: int
    columns: int  # of a row; the last ones of the last row may be padding
    sent: int  # values of a row
    bits: int  # of a value; 0: float32

    @classmethod
    def of(cls, sync: SyncConfig, length: int) -> "Payload":
        """The form of a tensor of so many values, 1 or more."""
        rows = -(-length // (CHUNK if sync.top_k else BLOCK))
        columns = -(-length // rows)
        sent = max(1, round(sync.top_k * columns)) if sync.top_k else columns
        return cls(rows, columns, sent, sync.quantise)

    @property
    def scales(self) -> int:
        """The scales of a row: with 2 bits both magnitudes, else the largest."""
        return {0: 0, 2: 2}.get(self.bits, 1)

    @property
    def low_bits(self) -> int:
        """Bits of an index that are sent as they are."""
        return (self.columns // self.sent).bit_length() - 1

    @property
    def bitmap(self) -> int:
        """Bits of a row in which the high bits of its indices lie."""
        return self.sent + ((self.columns - 1) >> self.low_bits)

    def num_values(self, length: int) -> int:
        """The values that are sent of a tensor of so many."""
        return self.rows * self.sent if self.sent < self.columns else length

    def sizes(self, length: int) -> tuple[int, int, int, int]:
        """(bytes of scales, values, bitmaps, low bits)."""
        values = self.num_values(length)
        value_bytes = -(-values * self.bits // 8) if self.bits else 4 * values
        scale_bytes = SCALE_BYTES * self.scales * self.rows
        if self.sent == self.columns:
            return scale_bytes, value_bytes, 0, 0
        bitmaps, lows = self.rows * self.bitmap, values * self.low_bits
        return scale_bytes, value_bytes, -(-bitmaps // 8), -(-lows // 8)


class Segment(NamedTuple):
    """Some of a flat tensor: groups of its ranges, each with one form.

    Ranges that are full rows of one length are a group: compressing them together takes as many
    launches as one of them.
    """

    groups: tuple[tuple[Range, ...], ...]
    forms: tuple[Payload, ...]

    @classmethod
    def of(cls, sync: SyncConfig, ranges: Sequence[Range]) -> "Segment":
        """The segment of some ranges (offset, length), each with rows of its own."""
        groups: dict[Range | int, list[tuple[Range, Payload]]] = {}
        for span in ranges:
            form = Payload.of(sync, span[1])
            full = form.rows * form.columns == span[1]
            groups.setdefault(form.columns if full else span, []).append((span, form))
        forms = [
            members[0][1]._replace(rows=sum(form.rows for _, form in members))
            for members in groups.values()
        ]
        return cls(
            tuple(tuple(span for span, _ in group) for group in groups.values()), tuple(forms)
        )

    @property
    def lengths(self) -> list[int]:
        """Values of each group."""
        return [sum(length for _, length in group) for group in self.groups]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each group."""
        pairs = zip(self.forms, self.lengths, strict=True)
        return [sum(form.sizes(length)) for form, length in pairs]

    @property
    def bytes(self) -> int:
        """Bytes of a payload, with its count."""
        return sum(self.sizes) + COUNT_BYTES


def segment(sync: SyncConfig, sizes: Mapping[str, int]) -> Segment:
    """All of some parameters, of so many elements each, that lie one after another."""
    return Segment.of(sync, _ranges(sizes))


def segments(sync: SyncConfig, sizes: Mapping[str, int], owners: int) -> list[Segment]:
    """The segment of each owner: its share of every parameter's blocks.

    That depends on the parameter alone, so that its copies on other ranks, as those of a tied
    embedding, lose the same. The name says who owns the first, which is all there is of a bias.
    """
    owned: list[list[Range]] = [[] for _ in range(owners)]
    for (name, length), (offset, _) in zip(sizes.items(), _ranges(sizes), strict=True):
        blocks = -(-length // BLOCK)
        ends = [min(length, blocks * i // owners * BLOCK) for i in range(owners + 1)]
        for i, (first, last) in enumerate(pairwise(ends)):
            if first < last:
                owner = (i + crc32(name.encode())) % owners
                owned[owner].append((offset + first, last - first))
    return [Segment.of(sync, ranges) for ranges in owned]


def _ranges(sizes: Mapping[str, int]) -> list[Range]:
    offsets = accumulate(sizes.values(), initial=0)
    return list(zip(offsets, sizes.values(), strict=False))
