"""Loops of lazy greedy over similarities in memory, compiled for the CPU by numba.

A matrix [n, n], of which row j has the similarities of all points to candidate j; `best` [n] is
every point's largest similarity to the picks, and it counts as `counts` [n].
"""

from functools import partial

import numpy as np

from mtcli.core.runtime.compiled import compiled

# Sums in any order, of numbers that are never NaN; infinity stays what it is.
summed = partial(compiled, fastmath={"reassoc", "contract", "nsz", "nnan"})


@summed
def gain(row: np.ndarray, best: np.ndarray, counts: np.ndarray) -> float:
    """What a candidate with this row adds: the sum of m_i max(s_i - best_i, 0)."""
    total = row[0] * 0
    for i in range(len(row)):
        total += counts[i] * max(row[i] - best[i], 0)
    return total


@summed
def refresh(
    matrix: np.ndarray, best: np.ndarray, counts: np.ndarray, bounds: np.ndarray, ties: float
) -> tuple[int, int]:
    """Computes bounds of gains again, the largest first, until no other can win or tie.

    Returns the lowest candidate of the best, and how many were computed. Gains within a part
    `ties` of the best one are as good.
    """
    first = bounds.argmax()
    bounds[first] = top = gain(matrix[first], best, counts)
    fresh, least = [first], top - ties * abs(top)
    candidates = np.flatnonzero(bounds >= least)
    for candidate in candidates[np.argsort(-bounds[candidates])]:
        if bounds[candidate] < least:
            break
        if candidate != first:
            bounds[candidate] = gain(matrix[candidate], best, counts)
            fresh.append(candidate)
            top = max(top, bounds[candidate])
            least = top - ties * abs(top)
    winner = first
    for candidate in fresh:
        if bounds[candidate] >= least and (candidate < winner or bounds[winner] < least):
            winner = candidate
    return winner, len(fresh)


@summed
def take(
    matrix: np.ndarray,
    changed: np.ndarray,
    before: np.ndarray,
    best: np.ndarray,
    counts: np.ndarray,
    bounds: np.ndarray,
) -> None:
    """Subtracts from all bounds what points that came nearer to the picks no longer add."""
    for i in changed:
        row, low, high, count = matrix[i], before[i], best[i], counts[i]
        for j in range(len(bounds)):
            bounds[j] -= count * (min(max(row[j], low), high) - low)
