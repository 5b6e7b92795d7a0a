"""Counts the words of documents in a loop compiled by numba."""

import numpy as np

from mtcli.core.curate.hashing import PACKED
from mtcli.core.runtime.compiled import compiled

ALL_BITS, BYTE_BITS = np.uint64(2**64 - 1), 8


@compiled
def count_words(
    data: np.ndarray,
    eights: np.ndarray,
    offsets: np.ndarray,
    kinds: np.ndarray,
    far: int,
    stop_words: np.ndarray,
) -> np.ndarray:
    """Counts per document, int64 [documents, 4]: words, their bytes, the words with a letter among
    their first `far` bytes, and a bit for each of `stop_words` that occurs.

    Document d is data[offsets[d] : offsets[d + 1]]; its last byte is a blank. `eights` views data
    as the eight bytes from each offset on (`hashing.unaligned`). `kinds` [256] is 0 for blanks, 2
    for letters, 1 for other bytes of words. A stop word has at most eight bytes, packed as in
    `eights`.
    """
    counts = np.zeros((len(offsets) - 1, 4), np.int64)
    blanks = np.empty(np.max(np.diff(offsets)) if len(counts) else 0, np.int64)
    for document in range(len(counts)):
        start, count = offsets[document], 0
        for i in range(start, offsets[document + 1]):  # no branch, which would be mispredicted
            blanks[count] = i
            count += kinds[data[i]] == 0
        words, size, lettered, bits = 0, 0, 0, 0
        for blank in blanks[:count]:
            length = blank - start
            if length:
                words, size, kind = words + 1, size + length, kinds[data[start]]
                for i in range(start + 1, min(blank, start + far)):
                    if kind == 2:
                        break
                    kind = kinds[data[i]]
                lettered += kind == 2
                if length <= PACKED:
                    packed = eights[start] & ALL_BITS >> np.uint64(BYTE_BITS * (PACKED - length))
                    for bit in range(len(stop_words)):
                        bits |= (packed == stop_words[bit]) << bit
            start = blank + 1
        counts[document] = words, size, lettered, bits
    return counts
