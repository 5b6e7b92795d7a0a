"""Compiled loops over shingles, beside plain Python with whole numbers."""

import numpy as np
import pytest

from mtcli.core.curate.hashing import BASE, MULTIPLIER, SECOND
from mtcli.core.curate.shingles import hash_shingles, shingle_codes, sketch

ALL = (1 << 64) - 1


def mixed(value):
    value = (value ^ value >> 32) * int(MULTIPLIER) & ALL
    value = (value ^ value >> 29) * int(SECOND) & ALL
    return value ^ value >> 32


def polynomial(shingle):
    value = 0
    for code in shingle:
        value = value * BASE + code + 1 & ALL
    return mixed(value)


def plain_sketch(hashes, count):
    """Of each column the least (round, value), of all rounds."""
    row = [[] for _ in range(count)]
    for turn in range(2 * count):
        for one in hashes:
            value = mixed(one ^ mixed(turn)) if turn else one
            column = (value >> 32) * count >> 32 if turn < count else turn - count
            row[column].append((turn, value >> 12))
    return [turn << 52 | value for turn, value in map(min, row)]


@pytest.mark.parametrize("rare", ["\ud83d\ude00", "a\U0001f600\ud800b"])  # of 16 bits, and more
@pytest.mark.parametrize("size", [1, 5, 9, 64])
def test_a_shingles_hash_is_a_polynomial_of_its_characters(size, rare):
    for text in ["the cat sat on the mat " * 4, "", "h\u00e9", rare * 3, "x" * size]:
        codes = [ord(character) for character in text]
        windows = range(max(len(codes) - size + 1, min(len(codes), 1)))
        want = [polynomial(codes[i : i + size]) for i in windows]
        assert hash_shingles(shingle_codes(text), size).tolist() == want


@pytest.mark.parametrize("size", [1, 3])
def test_a_sketch_has_the_first_rounds_least_hash_in_each_column(size):
    source, lengths = np.random.default_rng(0), [1, 0, 2, 7, 40, 300]
    bounds = np.cumsum([0, *lengths])
    codes = source.integers(1 << 20, size=bounds[-1], dtype=np.uint32)
    found = sketch(codes, bounds, size, 16)
    for number, length in enumerate(lengths):
        hashes = hash_shingles(codes[bounds[number] : bounds[number + 1]], size).tolist()
        assert found[number].tolist() == (plain_sketch(hashes, 16) if length else [ALL] * 16)


@pytest.mark.parametrize("size", [10, 60, 400, 2000])
def test_a_sketch_estimates_jaccard_as_closely_as_independent_hashes_at_any_length(size):
    """Equal values are J k of k on average, with at most a variance of k J (1 - J)."""
    source, pairs, count, jaccard = np.random.default_rng(size), 500, 192, 0.8
    sets = [source.choice(1 << 20, size, replace=False) for _ in range(pairs)]
    codes = np.array(sets, np.uint32)  # a shingle is a character here
    share = size // 10  # of each own side: 0.8 of the union is common
    both = np.stack([codes[:, share:], codes[:, : size - share]], axis=1).reshape(-1)
    found = sketch(both, np.arange(2 * pairs + 1) * (size - share), 1, count)
    equal = np.count_nonzero(found[::2] == found[1::2], axis=1)
    spread = count * jaccard * (1 - jaccard)
    assert abs(equal.mean() - jaccard * count) < 4 * (spread / pairs) ** 0.5
    assert equal.var() < 1.25 * spread
