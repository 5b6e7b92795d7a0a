"""Hashes words and n-grams in numpy, in a few passes over the bytes of many documents.

Arithmetic is modulo 2^64. A hash depends on its characters alone, neither on the text around them
nor on the batch.
"""

from functools import cache

import numpy as np

Array = np.ndarray
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, odd
SECOND = np.uint64(0xD6E8FEB86659FD93)
BASE = 0xD1342543DE82EF95  # of polynomials over words; odd, so that its powers have inverses
PACKED = 8  # characters of ASCII in 64 bits
MASKS = np.array([(1 << 8 * n) - 1 for n in range(PACKED + 1)], np.uint64)


def mix(values: Array) -> Array:
    """Spreads 64-bit values over all bits (xor-shift and multiply, twice)."""
    mixed: Array = values ^ (values >> np.uint64(32))
    mixed *= MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    mixed *= SECOND
    mixed ^= mixed >> np.uint64(32)
    return mixed


def jaccard(one: Array, other: Array) -> float:
    """Returns the Jaccard similarity of two sorted arrays without repetitions."""
    both = np.concatenate([one, other])
    both.sort()
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    union = one.size + other.size - common
    return common / union if union else 1.0


def changes(values: Array) -> Array:
    """Says whether each value, or row, differs from the previous one: bool [values]."""
    changed = np.ones(len(values), bool)
    differ = values[1:] != values[:-1]
    changed[1:] = differ if values.ndim == 1 else differ.any(axis=1)
    return changed


def runs(values: Array) -> tuple[Array, Array]:
    """Finds the start and the length of each run of equal values."""
    begins = np.flatnonzero(changes(values))
    return begins, np.diff(np.append(begins, len(values)))


def unaligned(data: bytes, count: int) -> Array:
    """Views the eight bytes from each of the first `count` offsets as uint64; `data` has 8 bytes
    more than that."""
    return np.ndarray((count,), "<u8", data, strides=(1,))


def token_hashes(view: Array, starts: Array, lengths: Array) -> Array:
    """Hashes byte ranges [tokens], eight bytes at a time, from a view of `unaligned`."""
    hashes = view[starts] & MASKS[np.minimum(lengths, PACKED)]
    done = PACKED
    longer = np.flatnonzero(lengths > done)
    while longer.size:
        words = view[starts[longer] + done] & MASKS[np.minimum(lengths[longer] - done, PACKED)]
        hashes[longer] = mix(hashes[longer]) + words
        done += PACKED
        longer = longer[lengths[longer] > done]
    return mix(hashes)


def rolling(hashes: Array, size: int) -> Array:
    """Hashes every window of `size` tokens [tokens - size + 1], by one cumulative sum."""
    if hashes.size < size:
        return np.zeros(0, np.uint64)
    powers, inverses = _powers(1 << max(16, int(hashes.size).bit_length()))
    sums = np.zeros(hashes.size + 1, np.uint64)
    np.cumsum(hashes * powers[: hashes.size], out=sums[1:])
    return mix((sums[size:] - sums[:-size]) * inverses[: hashes.size - size + 1])


@cache
def _powers(count: int) -> tuple[Array, Array]:
    """Returns the first powers of BASE, and of its inverse, modulo 2^64."""
    both = []
    for base in (BASE, pow(BASE, -1, 1 << 64)):
        powers = np.full(count, base, np.uint64)
        powers[0] = 1
        both.append(np.cumprod(powers))
    return both[0], both[1]
