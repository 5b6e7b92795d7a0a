"""Computes statistics of evaluation: intervals of accuracies, and paired comparisons of two models.

Wilson's score interval (1927), standard errors clustered by passage (Miller, arXiv:2411.00640,
section 2.2), McNemar's exact test (1947), paired bootstrap (Efron, 1979) and Holm's correction
(1979). No test approximates small counts by a normal distribution.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95  # of intervals
LEVEL = 1.0 - CONFIDENCE  # below which a p-value says that models differ
POWER = 0.8  # of the minimum detectable effect
RESAMPLES = 10_000
SEED = 1234  # of resampling
ROUNDING = 1e-12  # of the largest value: a standard error that sums of float64 leave of 0
CHUNK = 1 << 24  # numbers drawn at once
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)

Floats = NDArray[np.float64]


class Accuracy(NamedTuple):
    """The share of right items, its interval, and its standard error."""

    value: float
    interval: list[float]
    standard_error: float


class Comparison(NamedTuple):
    """The difference of two models on the same items, b - a, and its significance."""

    difference: float
    interval: list[float]  # of the difference, by bootstrap
    p_value: float
    minimum_detectable: float | None  # found in 4 of 5 such comparisons; None: no spread


def accuracy_of(right: Sequence[bool], clusters: Sequence[str] | None = None) -> Accuracy:
    """Computes the accuracy of items; items of one of the `clusters` are not independent."""
    total = len(right)
    values = np.array(right, np.float64)
    return Accuracy(
        float(values.mean()), wilson(int(values.sum()), total), standard_error(values, clusters)
    )


def wilson(correct: int, total: int) -> list[float]:
    """Computes Wilson's score interval [low, high] of a share."""
    share, extra = correct / total, Z * Z / total
    middle = (share + extra / 2) / (1 + extra)
    half = Z / (1 + extra) * math.sqrt(share * (1 - share) / total + extra / (4 * total))
    return [max(0.0, middle - half), min(1.0, middle + half)]


def standard_error(values: ArrayLike, clusters: Sequence[str] | None = None) -> float:
    """Computes the standard error of a mean, with correlated items in clusters (arXiv:2411.00640).

    For independent items it is sqrt(sum of squares) / n: the divisor is n, not n - 1.
    """
    centred = np.asarray(values, np.float64)
    centred = centred - centred.mean()
    return float(np.sqrt((cluster_sums(centred, clusters) ** 2).sum()) / len(centred))


def cluster_sums(values: Floats, clusters: Sequence[str] | None) -> Floats:
    """Sums the values of each cluster; without clusters each value is its own."""
    if clusters is None:
        return values
    _, numbers = np.unique(np.array(clusters), return_inverse=True)
    return np.bincount(numbers, weights=values).astype(np.float64)


def mcnemar(only_a: int, only_b: int) -> float:
    """Computes the exact two-sided p-value of the items that only a, or only b, has right."""
    discordant, fewer = only_a + only_b, min(only_a, only_b)
    # Whole numbers: exact for any count.
    tail, term = 0, 1
    for k in range(fewer + 1):
        tail += term
        term = term * (discordant - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << discordant)) if discordant else 1.0


def bootstrap(differences: ArrayLike, clusters: Sequence[str] | None = None) -> list[float]:
    """Computes the percentile interval [low, high] of the mean of paired differences, by resampling
    items, or clusters where given."""
    values = np.asarray(differences, np.float64)
    sums = cluster_sums(values, clusters)
    sizes = cluster_sums(np.ones_like(values), clusters)
    # Equal clusters are drawn as one kind: of accuracies there are few kinds, whatever their number
    kinds, counts = np.unique(np.stack([sums, sizes]), axis=1, return_counts=True)
    draw, share = np.random.default_rng(SEED), counts / counts.sum()
    means: list[Floats] = []
    step = max(1, CHUNK // len(counts))
    for start in range(0, RESAMPLES, step):
        drawn = draw.multinomial(len(sums), share, min(step, RESAMPLES - start))
        means.append((drawn @ kinds[0]) / (drawn @ kinds[1]))
    tails = [LEVEL / 2, 1 - LEVEL / 2]
    return [float(x) for x in np.quantile(np.concatenate(means), tails)]


def minimum_detectable(
    differences: ArrayLike, clusters: Sequence[str] | None = None
) -> float | None:
    """Computes the difference that a two-sided test at 5 % detects with a power of 80 %; None where
    the paired differences have no spread to tell it by, as of one item, one cluster or equal
    answers."""
    values = np.asarray(differences, np.float64)
    error = standard_error(values, clusters)
    if error <= ROUNDING * np.abs(values).max():
        return None
    return (Z + NormalDist().inv_cdf(POWER)) * error


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Computes Holm's adjusted p-values of several tests: the smallest times their number, and so
    on."""
    adjusted, least = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = least
    return {name: adjusted[name] for name in p_values}


def compare_accuracies(
    right_a: Sequence[bool], right_b: Sequence[bool], clusters: Sequence[str] | None = None
) -> Comparison:
    """Compares two models on the same items."""
    a, b = np.array(right_a, np.float64), np.array(right_b, np.float64)
    differences = b - a
    p_value = mcnemar(int((differences < 0).sum()), int((differences > 0).sum()))
    return Comparison(
        float(differences.mean()),
        bootstrap(differences, clusters),
        p_value,
        minimum_detectable(differences, clusters),
    )
