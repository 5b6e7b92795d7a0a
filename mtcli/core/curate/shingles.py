"""Hashes and sketches shingles in loops over characters, compiled by numba, whose import takes half
a second.

`offsets` int64 [documents + 1] says where each document begins. Arithmetic is modulo 2^64.
"""

from collections.abc import Sequence

import numpy as np

from mtcli.core.curate.hashing import BASE, MULTIPLIER, SECOND, Array, changes
from mtcli.core.runtime.compiled import compiled

BASE_64 = np.uint64(BASE)
HALF, THIRD = np.uint64(32), np.uint64(29)
ONE = np.uint64(1)
ROUND_BITS, VALUE_BITS = np.uint64(12), np.uint64(52)  # of a value: its round, and a part of a hash
EMPTY = np.uint64(2**64 - 1)


def signatures(texts: Sequence[str], size: int, count: int) -> Array:
    """Sketches the set of each text's shingles: uint64 [texts, count]."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    sketches: Array = sketch(shingle_codes("".join(texts)), offsets, size, count)
    return sketches


def shingle_set(text: str, size: int) -> Array:
    """Returns the sorted unique hashes of a text's shingles."""
    # numpy's own unique takes 20 times as long.
    hashes = np.sort(hash_shingles(shingle_codes(text), size))
    distinct: Array = hashes[changes(hashes)]
    return distinct


def shingle_codes(text: str) -> Array:
    """Encodes a text as code points [characters]: of 16 bits, in half the time, where they fit,
    else of 32."""
    codes = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), "<u2")
    if len(codes) == len(text):
        return codes
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


@compiled
def mixed(value: np.uint64) -> np.uint64:
    """Spreads a value over all bits, as `hashing.mix` does."""
    value ^= value >> HALF
    value *= MULTIPLIER
    value ^= value >> THIRD
    value *= SECOND
    return value ^ (value >> HALF)


@compiled
def first_window(text: np.ndarray, size: int) -> tuple[np.uint64, np.uint64]:
    """Returns the polynomial of the first window of `size` characters, or of a shorter text, and
    the factor that removes a window's first character from the next."""
    value, lead = np.uint64(0), ONE
    for i in range(min(size, len(text))):
        value = value * BASE_64 + np.uint64(text[i]) + ONE
    for _ in range(size):
        lead *= BASE_64
    return value, lead


@compiled
def next_window(value: np.uint64, lead: np.uint64, first: int, following: int) -> np.uint64:
    """Advances the polynomial of a window by one character (Karp and Rabin 1987).

    In this order one product waits for the previous value, not two.
    """
    change = np.uint64(following) + ONE - lead * (np.uint64(first) + ONE)
    return value * BASE_64 + change


@compiled
def hash_shingles(text: np.ndarray, size: int) -> np.ndarray:
    """Hashes every window of `size` characters: uint64 [windows].

    A text shorter than a window is one shingle; an empty text has none.
    """
    following = text[size:]
    hashes = np.empty(len(following) + min(len(text), 1), np.uint64)
    value, lead = first_window(text, size)
    for i in range(len(following)):
        hashes[i] = mixed(value)
        value = next_window(value, lead, text[i], following[i])
    hashes[len(following) :] = mixed(value)
    return hashes


@compiled
def place(row: np.ndarray, hashed: np.uint64, columns: np.uint64) -> None:
    """Lowers a column of a sketch to a hash that falls into it, where the hash is less."""
    column = (hashed >> HALF) * columns >> HALF
    row[column] = min(row[column], hashed >> ROUND_BITS)


@compiled
def fill(row: np.ndarray, text: np.ndarray, size: int) -> None:
    """Fills the columns of a text's sketch that the first round left empty."""
    empty, turn = 0, 1
    for value in row:
        empty += value == EMPTY
    hashes = hash_shingles(text, size) if empty else row
    while empty:
        seed, high = mixed(np.uint64(turn)), np.uint64(turn) << VALUE_BITS
        for i in range(len(hashes)):
            hashed = mixed(hashes[i] ^ seed)
            column = (hashed >> HALF) * np.uint64(len(row)) >> HALF
            if turn >= len(row):
                column = np.uint64(turn - len(row))
            empty -= row[column] == EMPTY
            # Values of earlier rounds are less, and stay.
            row[column] = min(row[column], high | hashed >> ROUND_BITS)
        turn += 1


@compiled
def sketch(codes: np.ndarray, offsets: np.ndarray, size: int, count: int) -> np.ndarray:
    """Sketches the set of each document's shingles: uint64 [documents, count].

    Two documents have the same value in a column with a probability of their Jaccard similarity.
    In a round every hash falls into one column, which keeps the least; rounds go on while columns
    are empty, and after `count` of them all hashes fall into one column after another. So a long
    document takes one hash of each shingle, not `count`, and columns of a short one are as
    independent as those of MinHash (Dahlgaard, Knudsen, Thorup 2017, arXiv:1704.04370, section 2).
    """
    sketches = np.full((len(offsets) - 1, count), EMPTY)
    columns = np.uint64(count)
    for document in range(len(offsets) - 1):
        text, row = codes[offsets[document] : offsets[document + 1]], sketches[document]
        value, lead = first_window(text, size)
        following = text[size:]
        for i in range(len(following)):  # places one hash while it waits for the next's product
            place(row, mixed(value), columns)
            value = next_window(value, lead, text[i], following[i])
        if len(text):
            place(row, mixed(value), columns)
            fill(row, text, size)
    return sketches
