"""Hyperband's brackets against the paper's algorithm, and both rules by hand."""

from math import inf, nan

from mtcli.core.sweep.stopping import Hyperband, below_median, best, mean_loss


def test_brackets_are_those_of_the_paper():
    """arXiv:1603.06560, algorithm 1 by hand: R = 81, eta = 3, ceil(5 * 3^s / (s + 1)) trials."""
    found = [[tuple(rung) for rung in rungs] for rungs in Hyperband(81, 3).brackets(81)]
    assert found == [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ]
    assert Hyperband(81, 3).trials() == 143


def test_units_are_shares_of_the_steps_of_a_run():
    (first, *_, last) = Hyperband(9, 3).brackets(180)
    assert [rung.step for rung in first] == [20, 60, 180]
    assert [rung.step for rung in last] == [180]


def test_the_best_are_those_of_the_least_mean_over_the_last_steps():
    losses = {"a": [9.0, 1.0, 1.0], "b": [0.0, 2.0, 2.0], "c": [5.0, 1.5], "d": [1.0, nan, 1.0]}
    assert best(losses, 3, 2, 2) == ["a", "b"]
    assert best(losses, 3, 2, 3) == ["b", "a"]
    assert mean_loss(losses["c"], 3, 2) == inf and mean_loss(losses["d"], 3, 2) == inf


def test_the_median_rule_stops_whose_best_is_worse_than_the_others_average():
    losses = {
        "good": [4.0, 3.0, 2.0, 1.0],
        "fair": [4.0, 3.5, 3.0, 2.5],
        "poor": [4.0, 4.0, 4.0, 4.0],
        "late": [4.0, 3.0],
    }
    # others' averages over 4 steps: good 2.5, fair 3.25, poor 4; the best means of 2 steps are 1.5,
    # 2.75 and 4, against the medians (3.25 + 4) / 2, (2.5 + 4) / 2 and (2.5 + 3.25) / 2
    assert below_median(losses, 4, 2) == ["poor"]
    assert below_median({"alone": [1.0, 2.0]}, 2, 2) == []
    # the average of a trial itself, 3.25, is not among those: 2.5 is above 2, not above 2.625
    assert below_median({"poor": [4.0, 2.5], "good": [2.0, 2.0]}, 2, 1) == ["poor"]
