"""Lays out the compressed payloads of `local` and `diloco`, and counts their bytes.

Values lie in rows, each with scales of its own: a row is a block of consecutive values, or the
largest values of a chunk. The indices of the largest are in Elias and Fano's code (1974): the low
bits of each index as they are, and a bitmap whose i-th set bit is at i plus the high bits of index
i. With 1 of 64 values sent that takes 8 bits an index, where numbering a chunk takes 12 and the
least possible is 7.4.
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
        """The form of a tensor of `length` values, 1 or more."""
        rows = -(-length // (CHUNK if sync.top_k else BLOCK))
        columns = -(-length // rows)
        sent = max(1, round(sync.top_k * columns)) if sync.top_k else columns
        return cls(rows, columns, sent, sync.quantise)

    @property
    def scales(self) -> int:
        """Scales per row: with 2 bits both magnitudes, otherwise the largest one."""
        return {0: 0, 2: 2}.get(self.bits, 1)

    @property
    def low_bits(self) -> int:
        """The low bits of an index that are stored as they are."""
        return (self.columns // self.sent).bit_length() - 1

    @property
    def bitmap(self) -> int:
        """Bits of a row's bitmap, which encodes the high bits of its indices."""
        return self.sent + ((self.columns - 1) >> self.low_bits)

    def num_values(self, length: int) -> int:
        """The values sent of a tensor of `length` values."""
        return self.rows * self.sent if self.sent < self.columns else length

    def sizes(self, length: int) -> tuple[int, int, int, int]:
        """(bytes of scales, of values, of bitmaps, of low bits)."""
        values = self.num_values(length)
        value_bytes = -(-values * self.bits // 8) if self.bits else 4 * values
        scale_bytes = SCALE_BYTES * self.scales * self.rows
        if self.sent == self.columns:
            return scale_bytes, value_bytes, 0, 0
        bitmaps, lows = self.rows * self.bitmap, values * self.low_bits
        return scale_bytes, value_bytes, -(-bitmaps // 8), -(-lows // 8)


class Segment(NamedTuple):
    """A part of a flat tensor: groups of its ranges (offset, length), each group with one form.

    Ranges of full rows of one length form a group, which is compressed with the kernel launches of
    a single range.
    """

    groups: tuple[tuple[Range, ...], ...]
    forms: tuple[Payload, ...]

    @classmethod
    def of(cls, sync: SyncConfig, ranges: Sequence[Range]) -> "Segment":
        """The segment of some ranges; no row crosses the end of a range."""
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
        """Bytes of a payload, its count of replicas included."""
        return sum(self.sizes) + COUNT_BYTES


def segment(sync: SyncConfig, sizes: Mapping[str, int]) -> Segment:
    """One segment of all values of some parameters, whose `sizes` are concatenated."""
    return Segment.of(sync, _ranges(sizes))


def segments(sync: SyncConfig, sizes: Mapping[str, int], owners: int) -> list[Segment]:
    """The segment of each owner: its share of every parameter's blocks.

    The share of a parameter depends on its name and length alone, so that copies of it on other
    ranks (a tied embedding) lose the same values. A hash of the name chooses the owner of the first
    block, so that small parameters such as biases spread over owners.
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
