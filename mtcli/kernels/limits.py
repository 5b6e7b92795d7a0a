"""Sizes at which operations split their work. Imports no torch, so that plan can read them."""

from contextlib import suppress


def _is_intel() -> bool:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        return "GenuineIntel" in file.read(4096)  # of the first core
    return False


IS_INTEL = _is_intel()  # torch multiplies by MKL on a CPU, which is quickest on Intel's
# CPU attention by GEMMs, in attention/cpu.py. A longer row of scores falls out of the cache. On
# Intel torch's kernel is quicker for every row: it multiplies by MKL.
CPU_ATTENTION_ROW_BYTES = 0 if IS_INTEL else 2048
# The same of a forward pass that also returns the log-sum-exp, which takes two more passes.
CPU_ATTENTION_LSE_ROW_BYTES = CPU_ATTENTION_ROW_BYTES // 4
# Scores of the heads, or logits of the rows, that a CPU takes through all passes: an L2 cache.
CPU_BLOCK_BYTES = 2**20
# Tokens whose logits the loss makes at a time on a GPU. Each chunk reads and writes the gradient of
# the weight in float32, 8 V D bytes beside 6 tokens V D operations: at an H200's rates 6 % of their
# time at 4096 tokens, 24 % at 1024. These are the least and the most bytes of a chunk's logits.
LOSS_CHUNK_ROWS, LOSS_CHUNK_BYTES = 4096, (2**28, 2**30)

# Chunks of an output that is summed over ranks behind its GEMM: on NVLink a collective of 8 MiB
# takes 25 us, and 15 us however small it is.
EXCHANGE_BYTES, MOST_EXCHANGES = 2**23, 4

# 64-bit numbers that a CPU makes at a time for a mask, in two buffers: of 2**14 to 2**20 the best.
RANDOM_BLOCK = 2**16


def block_rows(row_bytes: int) -> int:
    """The number of rows, at least one, that fit in CPU_BLOCK_BYTES."""
    return max(1, CPU_BLOCK_BYTES // max(1, row_bytes))


def exchange_chunks(moved: float) -> int:
    """The number of chunks in which an output of `moved` bytes is summed over ranks."""
    return max(1, min(MOST_EXCHANGES, int(moved) // EXCHANGE_BYTES))


def row_slices(count: int, step: int) -> list[slice]:
    """Slices of `count` rows, `step` at a time."""
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def chunk_rows(row_bytes: int, bounds: tuple[int, int] = LOSS_CHUNK_BYTES) -> int:
    """LOSS_CHUNK_ROWS, clamped to bounds of their bytes, as a multiple of 128 if possible."""
    least, most = bounds
    fitting = min(max(least, LOSS_CHUNK_ROWS * row_bytes), most) // row_bytes
    return max(1, fitting // 128 * 128 or fitting)
