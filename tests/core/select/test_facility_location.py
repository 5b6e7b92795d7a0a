"""Greedy facility location against brute force, a greedy of plain numpy, apricot and submodlib."""

from itertools import combinations
from math import exp

import numpy as np
import pytest
import torch
from marks import slow

from mtcli.core.select.facility_location import (
    Goal,
    MatrixSimilarities,
    lazy_greedy,
    naive_greedy,
    stochastic_greedy,
)


def similarities(n, seed=0, width=3):
    points = np.random.default_rng(seed).normal(size=(n, width))
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    return distances.max() - distances


def untied(n, seed):
    """Similarities in which no two points that are nearest to each other gain the same."""
    matrix = similarities(n, seed)
    return matrix + np.diag(1e-2 * np.random.default_rng(seed).random(n))


def value(matrix, chosen, counts=1.0):
    return float((matrix[list(chosen)].max(0) * counts).sum())


def run(greedy, matrix, size, counts=None, **more):
    counts = np.ones(len(matrix)) if counts is None else counts
    found = MatrixSimilarities(torch.from_numpy(matrix), more.pop("block", 7))
    return greedy(found, torch.from_numpy(counts), Goal(size, **more))


def greedy_of_numpy(matrix, size, counts):
    order, best = [], np.zeros(len(matrix))
    for _ in range(size):
        gains = (np.maximum(matrix - best, 0.0) * counts).sum(1)
        gains[order] = -1.0
        order.append(int(gains.argmax()))
        best = np.maximum(best, matrix[order[-1]])
    return order


@pytest.mark.parametrize("greedy", [naive_greedy, lazy_greedy])
def test_picks_are_those_of_a_greedy_that_looks_at_all(greedy):
    for seed in range(4):
        matrix = similarities(60, seed)
        counts = np.random.default_rng(seed).integers(1, 5, 60).astype(float)
        picks = run(greedy, matrix, 25, counts)
        assert picks.order == greedy_of_numpy(matrix, 25, counts), seed
        assert picks.value == pytest.approx(value(matrix, picks.order, counts), rel=1e-12)
        assert all(a >= b - 1e-12 for a, b in zip(picks.gains, picks.gains[1:], strict=False))


@pytest.mark.parametrize("greedy", [naive_greedy, lazy_greedy])
def test_greedy_reaches_its_share_of_the_brute_force_optimum(greedy):
    for seed in range(5):
        matrix = similarities(11, seed)
        for size in (2, 3, 4):
            best = max(value(matrix, chosen) for chosen in combinations(range(11), size))
            found = run(greedy, matrix, size).value
            assert (1.0 - exp(-1.0)) * best <= found <= best + 1e-9, (seed, size)


def test_of_equal_gains_the_lowest_candidate_is_picked_and_zero_gains_fill_the_budget():
    blocks = np.kron(np.eye(3), np.ones((4, 4)))  # three sets of four that are equal
    for greedy in (naive_greedy, lazy_greedy):
        assert run(greedy, blocks, 12).order == [0, 4, 8, 1, 2, 3, 5, 6, 7, 9, 10, 11]


def test_rounding_breaks_no_tie():
    random = np.random.default_rng(3)
    matrix = np.kron(np.eye(4), np.ones((5, 5)))
    noisy = matrix * (1.0 + 1e-16 * random.integers(-2, 3, matrix.shape))
    assert run(lazy_greedy, noisy, 4).order == [0, 5, 10, 15]


def test_picks_end_where_the_value_is_reached():
    matrix = similarities(40)
    all_picks = run(lazy_greedy, matrix, 40)
    values = np.cumsum(all_picks.gains)
    for count in (1, 5, 20):
        found = run(lazy_greedy, matrix, 40, value=float(values[count - 1]) - 1e-9)
        assert found.order == all_picks.order[:count]


def test_stochastic_picks_are_distinct_and_near_greedy_on_average():
    matrix = similarities(300, width=2)
    best = run(lazy_greedy, matrix, 30).value
    found = []
    for seed in range(8):
        counts = torch.ones(300, dtype=torch.float64)
        picks = stochastic_greedy(
            MatrixSimilarities(torch.from_numpy(matrix)), counts, Goal(30), seed=seed
        )
        assert len(set(picks.order)) == 30
        assert picks.value == pytest.approx(value(matrix, picks.order), rel=1e-12)
        found.append(picks.value)
    assert np.mean(found) > 0.99 * best


@slow("apricot compiles its loops for 5 s")
def test_picks_are_those_of_apricot():
    apricot = pytest.importorskip("apricot")
    matrix = untied(200, seed=2)
    oracle = apricot.FacilityLocationSelection(60, metric="precomputed", optimizer="lazy")
    assert run(lazy_greedy, matrix, 60).order == oracle.fit(matrix).ranking.tolist()


def test_picks_have_the_value_of_submodlibs():
    submodlib = pytest.importorskip("submodlib")
    matrix = untied(150, seed=4)
    oracle = submodlib.FacilityLocationFunction(
        n=150, mode="dense", sijs=matrix.astype(np.float32), separate_rep=False
    )
    picks = oracle.maximize(budget=40, optimizer="LazyGreedy", show_progress=False)
    found = run(lazy_greedy, matrix, 40)
    assert [index for index, _ in picks] == found.order
    assert [gain for _, gain in picks] == pytest.approx(found.gains, rel=1e-3)
