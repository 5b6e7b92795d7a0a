"""The sizes of compressed values: what `sync.quantise` and `sync.top_k` make of a tensor.

Values lie in rows that have scales of their own: blocks of consecutive ones, or the largest of each
chunk. The indices of these are in Elias and Fano's code (1974): low bits as they are, and a bitmap
in which the i-th bit that is set lies at i plus the high bits. With 1 of 64 that is 8 bits an
index, where 12 would number a chunk and 7.4 is the least.
"""

from typing import NamedTuple

from mtcli.core.config.sync import SyncConfig

BLOCK = 256  # values that share a scale
CHUNK = 4096  # of which the largest are sent (SparseLoCo, arXiv:2508.15706, section 3)
SCALE_BYTES = 4


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
        indices = self.rows * self.bitmap, values * self.low_bits
        if self.sent == self.columns:
            indices = 0, 0
        return scale_bytes, value_bytes, -(-indices[0] // 8), -(-indices[1] // 8)
