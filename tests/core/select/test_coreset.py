"""Core-sets of points: bounds, weights, groups, duplicates, parts that ranks share."""

import numpy as np
import pytest
import torch
from ranks import run_ranks

import mtcli.core.select.coreset as coreset
from mtcli.core.parallel.groups import world_axis
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.select.budgets import budgets_of
from mtcli.core.select.coreset import (
    Quota,
    Work,
    choose,
    evenly_weighed,
    judge,
    planned_bytes,
    random_orders,
    with_error,
)
from mtcli.core.select.distances import Points

WORK = Work(world_axis(0, 1, FlightRecorder()), torch.device("cpu"), seed=5)


def clusters(n, width=8, centres=12, seed=0):
    """float32 [n, width]: gradients that are alike in groups, as those of real data are."""
    random = np.random.default_rng(seed)
    middle = 3.0 * random.normal(size=(centres, width))
    points = middle[random.integers(0, centres, n)] + random.normal(size=(n, width))
    return torch.from_numpy(points.astype(np.float32))


def together(n):
    return [np.arange(n)]


def error(points, chosen):
    """|sum of g_i - sum of gamma_j g_j|, in float64."""
    points = points.double().numpy()
    return float(np.linalg.norm(points.sum(0) - chosen.weights @ points[chosen.indices]))


def residual(points, indices):
    points = points.double().numpy()
    return np.linalg.norm(points[:, None] - points[None, indices], axis=2).min(1).sum()


@pytest.mark.parametrize("size", [1, 7, 60, 300])
def test_the_bound_is_of_the_gradients_error_and_weights_sum_to_all(size):
    points = clusters(300)
    chosen = choose(points, together(300), Quota([size]), WORK)
    assert len(set(chosen.indices.tolist())) == size
    assert chosen.bound == pytest.approx(residual(points, chosen.indices), rel=1e-6, abs=1e-4)
    assert error(points, chosen) <= chosen.bound + 1e-3
    evenly = evenly_weighed(chosen, together(300))
    for one in (chosen, evenly):
        assert with_error(one, points).error == pytest.approx(error(points, one), rel=1e-9)
    assert chosen.weights.sum() == pytest.approx(300)
    assert chosen.weights.min() >= 1.0


def test_all_points_are_the_gradient_itself():
    points = clusters(50)
    chosen = choose(points, together(50), Quota([50]), WORK)
    assert sorted(chosen.indices.tolist()) == list(range(50))
    assert chosen.weights.tolist() == [1.0] * 50
    assert chosen.bound == 0.0
    assert error(points, chosen) < 1e-4


def test_core_sets_have_less_error_and_a_higher_objective_than_random_ones_of_their_size():
    points = clusters(400)
    chosen = choose(points, together(400), Quota([40]), WORK)
    errors, objectives = [], []
    for seed in range(10):
        orders = random_orders(together(400), [40], seed)
        random = evenly_weighed(judge(points, together(400), orders, WORK), together(400))
        errors.append(error(points, random))
        objectives.append(random.objective)
    assert error(points, chosen) < min(errors)
    assert chosen.objective > max(objectives)


def test_each_group_is_chosen_from_alone_and_weighs_what_it_has():
    points, random = clusters(200), np.random.default_rng(0)
    labels = random.integers(0, 3, 200)
    groups = [np.flatnonzero(labels == label) for label in range(3)]
    chosen = choose(points, groups, Quota([5, 20, 9]), WORK)
    for label, (group, size) in enumerate(zip(groups, (5, 20, 9), strict=True)):
        own = labels[chosen.indices] == label
        alone = choose(points[group], together(len(group)), Quota([size]), WORK)
        assert chosen.indices[own].tolist() == group[alone.indices].tolist()
        assert chosen.weights[own].tolist() == alone.weights.tolist()
        assert chosen.weights[own].sum() == pytest.approx(len(group))
    assert labels[chosen.indices[:9]].tolist() == [0, 1, 2] * 3  # any beginning has all groups


def test_equal_points_are_chosen_last_and_the_budget_is_filled():
    points = clusters(10)[[0, 1, 0, 2, 0, 1, 3, 3]]
    chosen = choose(points, together(8), Quota([6]), WORK)
    assert sorted(chosen.indices[:4].tolist()) == [0, 1, 3, 6]
    assert chosen.indices[4:].tolist() == [2, 4]
    weights = dict(zip(chosen.indices.tolist(), chosen.weights.tolist(), strict=True))
    assert weights == {0: 1.0, 1: 2.0, 3: 1.0, 6: 2.0, 2: 1.0, 4: 1.0}
    assert chosen.bound == 0.0


def test_a_cover_is_the_fewest_greedy_picks_whose_bound_is_small_enough():
    points = clusters(200)
    norms = float(points.double().norm(dim=1).sum())
    for part in (0.6, 0.3, 0.1):
        chosen = choose(points, together(200), Quota([], part), WORK)
        assert chosen.bound <= part * norms * (1 + 1e-9)
        fewer = choose(points, together(200), Quota([len(chosen.indices) - 1]), WORK)
        assert fewer.bound > part * norms
    everything = choose(points, together(200), Quota([], 0.0), WORK)
    assert len(everything.indices) == 200


def in_parts(runtime, n, size, most):
    coreset.MOST = coreset.PART = most
    work = Work(world_axis(runtime.rank, runtime.world, runtime.recorder), runtime.device, 5)
    chosen = choose(clusters(n), together(n), Quota([size]), work)
    return chosen.indices.tolist(), chosen.weights.tolist(), chosen.objective


def test_parts_that_ranks_share_choose_the_same_on_any_number_of_ranks_and_almost_as_well():
    alone = run_ranks(1, in_parts, 600, 40, 200)[0]
    assert run_ranks(3, in_parts, 600, 40, 200) == [alone] * 3
    at_once = choose(clusters(600), together(600), Quota([40]), WORK)
    assert len(set(alone[0])) == 40
    assert sum(alone[1]) == pytest.approx(600)
    assert 0.98 * at_once.objective < alone[2] <= at_once.objective * 1.001


def test_parts_see_together_what_each_sees_little_of(monkeypatch):
    """There are more clusters than a part chooses points; 0.92 of all's value was no better than
    random."""
    points = clusters(4000, width=32, centres=100)
    at_once = choose(points, together(4000), Quota([60]), WORK)
    monkeypatch.setattr(coreset, "MOST", 1000)
    monkeypatch.setattr(coreset, "PART", 500)
    in_parts = choose(points, together(4000), Quota([60]), WORK)
    random = judge(points, together(4000), random_orders(together(4000), [60], 0), WORK)
    assert random.objective < 0.94 * at_once.objective
    assert in_parts.objective > 0.98 * at_once.objective


def test_many_times_over_is_as_often_as_many(monkeypatch):
    """Equal points count as many times in parts too."""
    points = clusters(600).repeat(3, 1)
    monkeypatch.setattr(coreset, "MOST", 300)
    monkeypatch.setattr(coreset, "PART", 150)
    chosen = choose(points, together(1800), Quota([40]), WORK)
    assert len(np.unique(chosen.indices % 600)) == 40
    assert chosen.weights.sum() == 1800 and (chosen.weights >= 3).all()


def test_blocks_choose_what_a_matrix_in_memory_does(monkeypatch):
    points = clusters(300).double()
    dense = choose(points, together(300), Quota([30]), WORK)
    monkeypatch.setattr(coreset, "DENSE", 0)
    assert choose(points, together(300), Quota([30]), WORK).indices.tolist() == (
        dense.indices.tolist()
    )


def test_bytes_are_bounded_however_many_points_there_are():
    for n in (10_000, 50_000, 1_000_000):
        assert planned_bytes([n], 64) < 4 * 64 * n * 5 + (2 << 30)
    assert planned_bytes([50_000], 64) < 2 << 30
    matrix_of_a_part, proxies = 4 * coreset.PART**2, 4 * 64 * 1_000_000
    assert planned_bytes([1_000_000], 64) > matrix_of_a_part + proxies


def test_budgets_follow_shares_but_for_groups_that_are_too_small():
    for sizes, shares, total, expected in (
        ([300, 200], [3, 2], 50, [30, 20]),
        ([5, 5, 5], [1, 1, 1], 7, [3, 2, 2]),
        ([3, 100, 100], [50, 1, 1], 40, [3, 19, 18]),
        ([3, 1000], [3, 1000], 2, [1, 1]),
        ([1, 1, 98], [1, 1, 98], 10, [1, 1, 8]),
        ([4, 4], [4, 4], 8, [4, 4]),
        ([9, 9, 9], [12, 13, 15], 10, [3, 3, 4]),  # 3, 3.25 and 3.75
    ):
        assert budgets_of(sizes, shares, total) == expected, sizes


def test_blocks_of_distances_take_the_same_memory_each_time():
    """Memory that came and went beside small results made the heap grow to all distances."""
    points = Points(clusters(300))
    first, second = torch.arange(20), torch.arange(40, 50)
    expected = torch.cdist(points.left[second, :-2] / -2.0, points.right[:, :-2])
    begin = points.distances(first).data_ptr()
    found = points.distances(second)
    assert found.data_ptr() == begin
    assert found.double() == pytest.approx(expected.double(), rel=1e-4, abs=1e-3)
