"""Sizes that kernels work in, which the plan of memory counts with as well. Imports no torch."""

# CPU attention: rows of scores up to this long stay in the cache, so heads go block by block.
WHOLE_ROW_BYTES = 2048
# The same of a forward pass with a log-sum-exp, which takes two more passes.
PART_ROW_BYTES = 512
# Scores of such a block of heads, and logits of a block of rows on CPU: an L2 cache.
BLOCK_BYTES = 2**20
# Logits that the loss makes at a time on a GPU: 1024 tokens of 128k columns in 16 bits.
CHUNK_BYTES = 2**28
# Bytes per element while a dropout mask is hashed by torch: index, bits and a shifted copy.
HASH_BYTES = 3 * 8


def chunk_rows(row_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows that fill `chunk_bytes` at most, in multiples of 128 where that leaves any."""
    fitting = chunk_bytes // row_bytes
    return max(1, fitting // 128 * 128 or fitting)


def block_rows(row_bytes: int) -> int:
    """Rows that fill BLOCK_BYTES at most, and at least one."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))
