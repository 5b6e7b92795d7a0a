"""Importance resampling to a target corpus by hashed n-grams (DSIR, arXiv:2302.03169).

Sequences and target are bags of token ids and of pairs of neighbours, hashed into BUCKETS. The
weight of a sequence is the likelihood ratio of its bag under the two corpora; with Gumbel noise on
its logarithm the largest ones are a sample without replacement. It needs no model.
"""

from collections.abc import Callable, Iterator

import numpy as np

from mtcli.core.data.subset import TokenSequences

BUCKETS = 10_000
ROWS = 256  # sequences read at a time
_MIX = np.uint64(0x9E3779B97F4A7C15)
Advance = Callable[[int], object]


def resample(
    sequences: TokenSequences, target: TokenSequences, size: int, seed: int, advance: Advance
) -> np.ndarray:
    """Draws `size` candidates, those of the largest noisy weights first: int64 [size].

    `advance` gets the number of sequences read: the target's once, the candidates' twice.
    """
    ratios = np.log(_frequencies(target, advance)) - np.log(_frequencies(sequences, advance))
    scores = np.empty(len(sequences))
    for some, buckets in _bucketed(sequences, advance):
        scores[some] = ratios[buckets].sum(1)
    noise = np.random.default_rng([seed, 2]).gumbel(size=len(scores))
    return np.argsort(-(scores + noise), kind="stable")[:size]


def buckets_of(rows: np.ndarray) -> np.ndarray:
    """The buckets of a row's ids and pairs of neighbours: int64 [count, 2 * tokens - 1]."""
    ids = rows.astype(np.uint64) + np.uint64(1)
    pairs = (ids[:, :-1] * _MIX) ^ ids[:, 1:]
    grams = np.concatenate([ids, pairs + (np.uint64(1) << np.uint64(63))], 1) * _MIX
    grams ^= grams >> np.uint64(29)
    return ((grams * _MIX) >> np.uint64(32)).astype(np.int64) % BUCKETS


def _frequencies(sequences: TokenSequences, advance: Advance) -> np.ndarray:
    """The frequency of each bucket, none of which is 0: one is added to each count."""
    counts = np.ones(BUCKETS)
    for _, buckets in _bucketed(sequences, advance):
        counts += np.bincount(buckets.ravel(), minlength=BUCKETS)
    return counts / float(counts.sum())


def _bucketed(
    sequences: TokenSequences, advance: Advance
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (some candidates, their buckets) in turn."""
    for start in range(0, len(sequences), ROWS):
        some = np.arange(start, min(start + ROWS, len(sequences)))
        yield some, buckets_of(sequences.rows(some))
        advance(len(some))
