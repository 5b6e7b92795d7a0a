"""A loop over the words of documents, compiled for the CPU by numba."""

import numpy as np

from mtcli.core.runtime.compiled import compiled


@compiled
def matches(data: np.ndarray, start: int, stop: int, wanted: np.ndarray) -> int:
    """Bit i of the result says whether the bytes from `start` to `stop` are wanted[i]."""
    packed, found = np.uint64(0), 0
    for place in range(start, stop):
        packed = packed << np.uint64(8) | np.uint64(data[place])
    for place in range(len(wanted)):
        found |= (packed == wanted[place]) << place
    return found


@compiled
def count_words(
    data: np.ndarray, offsets: np.ndarray, kinds: np.ndarray, far: int, wanted: np.ndarray
) -> np.ndarray:
    """Counts words, their bytes, and those with a letter among their first `far` bytes; tells by
    bits which of `wanted` there are: int64 [documents, 4].

    Document d is data[offsets[d] : offsets[d + 1]]; its last byte is a blank. `kinds` [256] is 0
    for blanks, 2 for letters, 1 for what else words have. `wanted` are words of at most eight
    bytes, as whole numbers, the first byte the highest.
    """
    longest = 0
    while longest < 8 and wanted.max() >> np.uint64(8 * longest):
        longest += 1
    found = np.zeros((len(offsets) - 1, 4), np.int64)
    for document in range(len(found)):
        words, size, lettered, seen = 0, 0, 0, 0
        start, letter = -1, 0  # of the word that goes on
        for i in range(offsets[document], offsets[document + 1]):
            kind = kinds[data[i]]
            if kind:
                if start < 0:
                    start, letter = i, kind
                elif i < start + far:
                    letter |= kind
            elif start >= 0:
                words, size, lettered = words + 1, size + i - start, lettered + (letter >> 1)
                if i - start <= longest:
                    seen |= matches(data, start, i, wanted)
                start = -1
        found[document] = words, size, lettered, seen
    return found
