"""Lowers the bounds of greedy picks over similarities in memory; compiled for CPUs by numba.

Row i of a matrix [n, n] has the similarities of all candidates to point i. `previous_best` and
`best` [n] are the largest similarity of each point to the picks, without the last pick and with it;
`counts` [n] are the weights of points.
"""

from functools import partial

import numpy as np

from mtcli.core.runtime.compiled import compiled

# Sums in any order, of numbers that are never NaN; infinity stays what it is.
summed = partial(compiled, fastmath={"reassoc", "contract", "nsz", "nnan"})


@summed
def taken(row: float, low: float, high: float) -> float:
    """Computes how far a similarity lies between two others, from the lower one on."""
    return min(max(row, low), high) - low


@summed
def take(
    matrix: np.ndarray,
    changed: np.ndarray,
    previous_best: np.ndarray,
    best: np.ndarray,
    counts: np.ndarray,
    bounds: np.ndarray,
) -> None:
    """Subtracts from all bounds the gains that `changed` points, now nearer to the picks, no longer
    give.

    Four rows at a time: reading and writing the bounds takes as long as reading a row.
    """
    by_four = len(changed) // 4 * 4
    for start in range(0, by_four, 4):
        a, b, c, d = changed[start : start + 4]
        row_a, low_a, high_a, count_a = matrix[a], previous_best[a], best[a], counts[a]
        row_b, low_b, high_b, count_b = matrix[b], previous_best[b], best[b], counts[b]
        row_c, low_c, high_c, count_c = matrix[c], previous_best[c], best[c], counts[c]
        row_d, low_d, high_d, count_d = matrix[d], previous_best[d], best[d], counts[d]
        for j in range(len(bounds)):
            bounds[j] -= (
                count_a * taken(row_a[j], low_a, high_a)
                + count_b * taken(row_b[j], low_b, high_b)
                + count_c * taken(row_c[j], low_c, high_c)
                + count_d * taken(row_d[j], low_d, high_d)
            )
    for i in changed[by_four:]:
        row, low, high, count = matrix[i], previous_best[i], best[i], counts[i]
        for j in range(len(bounds)):
            bounds[j] -= count * taken(row[j], low, high)
