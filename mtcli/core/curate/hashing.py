"""Hashes of shingles, words and n-grams in numpy: a few passes over the bytes of many documents.

All arithmetic is modulo 2^64. A hash depends on its characters alone, not on the text around it nor
on how documents are batched.
"""

from collections.abc import Sequence
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
    mixed = values ^ (values >> np.uint64(32))
    mixed *= MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    mixed *= SECOND
    mixed ^= mixed >> np.uint64(32)
    return mixed


def shingle_hashes(texts: Sequence[str], size: int) -> tuple[Array, Array]:
    """Hashes every window of `size` characters: (uint64 hashes, uint64 offsets [documents + 1]).

    A document has as many hashes as characters: those of windows that would go on behind its end
    are its first one's, which changes no set. A text shorter than a window is a shingle by itself.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    joined = "".join(texts)
    hashes = _windows(joined, size)
    _close_ends(hashes, texts, offsets, size)
    return hashes, offsets.astype(np.uint64)


def shingle_set(text: str, size: int) -> Array:
    """The sorted hashes of a text's shingles, each once."""
    hashes = np.sort(shingle_hashes([text], size)[0])  # numpy's own unique takes 20 times as long
    once = np.ones(hashes.size, bool)
    once[1:] = hashes[1:] != hashes[:-1]
    return hashes[once]


def jaccard(one: Array, other: Array) -> float:
    """The Jaccard similarity of two sorted arrays without repetitions."""
    both = np.concatenate([one, other])
    both.sort()
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    union = one.size + other.size - common
    return common / union if union else 1.0


def _windows(joined: str, size: int) -> Array:
    """The mixed hash of the window at every character; beyond the end there are zeros."""
    packed = _packed(joined.encode("ascii", "replace"), size)
    if not joined.isascii():
        _add_others(packed, joined, size)
    packed *= MULTIPLIER
    packed ^= packed >> np.uint64(32)
    return packed


def _packed(data: bytes, size: int) -> Array:
    """Packs windows of bytes: eight to a word, each word times SECOND for each that follows."""
    view = unaligned(data + bytes(size + PACKED), len(data) + size)
    total = view[: len(data)] & MASKS[min(size, PACKED)]
    for start in range(PACKED, size, PACKED):
        total *= SECOND
        total += view[start : start + len(data)] & MASKS[min(size - start, PACKED)]
    return total


def _add_others(packed: Array, joined: str, size: int) -> None:
    """Puts characters that are not ASCII into the windows where a question mark stands for them.

    Each gets 64 bits of its own, or it would run over into its neighbours' bits.
    """
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
    places = np.flatnonzero(codes >= 128)
    added = mix(codes[places].astype(np.uint64)) - np.uint64(ord("?"))
    words = -(-size // PACKED)
    for back in range(size):
        inside = places >= back
        scale = pow(int(SECOND), words - 1 - back // PACKED, 1 << 64)
        shifted = (added[inside] << np.uint64(8 * (back % PACKED))) * np.uint64(scale)
        packed[places[inside] - back] += shifted  # no place twice


def _close_ends(hashes: Array, texts: Sequence[str], offsets: Array, size: int) -> None:
    """Replaces the hashes of windows that cross a document's end."""
    starts, stops = offsets[:-1], offsets[1:]
    long = stops - starts >= size
    for back in range(1, size):
        hashes[stops[long] - back] = hashes[starts[long]]
    for index in np.flatnonzero(~long & (stops > starts)):
        text = texts[index]
        hashes[starts[index] : stops[index]] = _windows(text + "\0" * (size - len(text)), size)[0]


def unaligned(data: bytes, count: int) -> Array:
    """The eight bytes from each of the first `count` offsets on, as uint64; data has 8 more."""
    return np.ndarray((count,), "<u8", data, strides=(1,))


def token_hashes(view: Array, starts: Array, lengths: Array) -> Array:
    """Hashes tokens of bytes [tokens]: eight at a time, from a view of `unaligned`."""
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
    """The first powers of BASE, and of its inverse, modulo 2^64."""
    found = []
    for base in (BASE, pow(BASE, -1, 1 << 64)):
        powers = np.full(count, base, np.uint64)
        powers[0] = 1
        found.append(np.cumprod(powers))
    return found[0], found[1]
