"""Hashes of shingles, and sketches of them: loops over characters, compiled by numba, whose import
takes half a second.

`offsets` int64 [documents + 1] says where each document begins. All arithmetic is modulo 2^64.
"""

from collections.abc import Sequence

import numpy as np

from mtcli.core.curate.hashing import BASE, MULTIPLIER, SECOND, Array
from mtcli.core.runtime.compiled import compiled

BASE_64 = np.uint64(BASE)
HALF, THIRD = np.uint64(32), np.uint64(29)
ONE = np.uint64(1)
ROUND_BITS, VALUE_BITS = np.uint64(12), np.uint64(52)  # of a value: its round, and a part of a hash
EMPTY = np.uint64(2**64 - 1)


def shingle_hashes(texts: Sequence[str], size: int) -> tuple[Array, Array]:
    """Hashes every window of `size` characters: (uint64 hashes, int64 offsets [documents + 1]).

    A document has as many hashes as characters: those of windows that would go on behind its end
    are its first one's, which changes no set. A text shorter than a window is a shingle by itself.
    """
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return hash_shingles(_codes("".join(texts)), offsets, size), offsets


def _codes(text: str) -> Array:
    """The characters' code points [characters]: 16 bits each, made in half the time, or 32."""
    codes = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), "<u2")
    if len(codes) == len(text):
        return codes
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def shingle_set(text: str, size: int) -> Array:
    """The sorted hashes of a text's shingles, each once."""
    hashes = np.sort(shingle_hashes([text], size)[0])  # numpy's own unique takes 20 times as long
    once = np.ones(hashes.size, bool)
    once[1:] = hashes[1:] != hashes[:-1]
    return hashes[once]


@compiled
def mixed(value: np.uint64) -> np.uint64:
    """Spreads a value over all bits, as `hashing.mix` does."""
    value ^= value >> HALF
    value *= MULTIPLIER
    value ^= value >> THIRD
    value *= SECOND
    return value ^ (value >> HALF)


@compiled
def hash_shingles(codes: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
    """Hashes the window of `size` characters at each of `codes`: uint64 [characters].

    It is a polynomial of the characters, one more and one less at each step (Karp and Rabin 1987).
    """
    hashes = np.empty(len(codes), np.uint64)
    lead = ONE
    for _ in range(size):
        lead *= BASE_64
    for document in range(len(offsets) - 1):
        text = codes[offsets[document] : offsets[document + 1]]
        found = hashes[offsets[document] : offsets[document + 1]]
        value = np.uint64(0)
        for i in range(min(size, len(text))):
            value = value * BASE_64 + np.uint64(text[i]) + ONE
        following = text[size:]
        for i in range(len(following)):
            found[i] = mixed(value)
            # In this order one product waits for the last value, not two.
            change = np.uint64(following[i]) + ONE - lead * (np.uint64(text[i]) + ONE)
            value = value * BASE_64 + change
        found[len(following) :] = found[0] if len(following) else mixed(value)
        if len(following):
            found[len(following)] = mixed(value)
    return hashes


@compiled
def sketch(hashes: np.ndarray, offsets: np.ndarray, count: int) -> np.ndarray:
    """Sketches the set of each document's hashes: uint64 [documents, count].

    Two documents have the same value in a column with a probability of their Jaccard similarity.
    In a round every hash falls into one column, which keeps the least; rounds go on while columns
    are empty, and after `count` of them all hashes fall into one column after another. So a long
    document takes one hash of each shingle, not `count`, and columns of a short one are as
    independent as those of MinHash (Dahlgaard, Knudsen, Thorup 2017, arXiv:1704.04370, section 2).
    """
    found = np.full((len(offsets) - 1, count), EMPTY)
    columns = np.uint64(count)
    for document in range(len(offsets) - 1):
        one, row = hashes[offsets[document] : offsets[document + 1]], found[document]
        for i in range(len(one)):
            column = (one[i] >> HALF) * columns >> HALF
            row[column] = min(row[column], one[i] >> ROUND_BITS)
        empty = np.count_nonzero(row == EMPTY) if len(one) else 0
        turn = 1
        while empty:
            seed, high = mixed(np.uint64(turn)), np.uint64(turn) << VALUE_BITS
            for i in range(len(one)):
                value = mixed(one[i] ^ seed)
                column = (value >> HALF) * columns >> HALF
                if turn >= count:
                    column = np.uint64(turn - count)
                empty -= row[column] == EMPTY
                # Values of earlier rounds are less, and stay.
                row[column] = min(row[column], high | value >> ROUND_BITS)
            turn += 1
    return found
