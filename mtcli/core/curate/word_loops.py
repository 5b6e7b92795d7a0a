"""A loop over the words of documents, compiled for the CPU by numba."""

import numba
import numpy as np


@numba.njit(cache=True)
def count_words(
    data: np.ndarray, offsets: np.ndarray, kinds: np.ndarray, far: int, wanted: np.ndarray
) -> np.ndarray:
    """Counts words, their bytes, those with a letter among their first `far` bytes, and how many of
    `wanted` there are: int64 [documents, 4].

    Document d is data[offsets[d] : offsets[d + 1]], of which the last byte is a blank. `kinds` [256]
    is 0 for blanks, 2 for letters, 1 for what else words have. `wanted` are words of fewer than
    eight bytes, as whole numbers, the first byte the highest.
    """
    longest = 0  # bytes of those wanted
    while wanted.max() >> np.uint64(8 * longest):
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
                    packed = np.uint64(0)
                    for place in range(start, i):
                        packed = packed << np.uint64(8) | np.uint64(data[place])
                    for place in range(len(wanted)):
                        seen |= (packed == wanted[place]) << place
                start = -1
        found[document] = words, size, lettered, 0
        while seen:
            seen &= seen - 1
            found[document, 3] += 1
    return found
