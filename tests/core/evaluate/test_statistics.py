"""Statistics against scipy, closed forms and enumeration."""

import itertools

import numpy as np
import pytest
from scipy.stats import binomtest

from mtcli.core.evaluate.statistics import (
    accuracy_of,
    bootstrap,
    compare_accuracies,
    holm,
    mcnemar,
    minimum_detectable,
    standard_error,
    wilson,
)


@pytest.mark.parametrize(("correct", "total"), [(0, 5), (3, 7), (7, 7), (811, 1838)])
def test_wilsons_interval_is_scipys(correct, total):
    expected = binomtest(correct, total).proportion_ci(0.95, "wilson")
    assert wilson(correct, total) == pytest.approx([expected.low, expected.high], abs=1e-12)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 6), (3, 3), (10, 2), (120, 90), (0, 2000)])
def test_mcnemars_test_is_scipys_binomial_test(a, b):
    expected = binomtest(a, a + b, 0.5).pvalue if a + b else 1.0
    assert mcnemar(a, b) == pytest.approx(expected, rel=1e-9)


def test_items_that_share_a_passage_count_as_less():
    right = [True] * 4 + [False] * 4
    alone = accuracy_of(right)
    assert alone.standard_error == pytest.approx((0.5 * 0.5 / 8) ** 0.5)
    # two passages of four questions that go together are two items
    assert standard_error(right, list("aaaabbbb")) == pytest.approx((0.5 * 0.5 / 2) ** 0.5)
    assert standard_error(right, list("abcdefgh")) == pytest.approx(alone.standard_error)


def test_the_bootstrap_is_that_of_all_resamples():
    values = [1.0, 0.0, -1.0, 1.0]
    means = [np.mean(drawn) for drawn in itertools.product(values, repeat=4)]
    assert bootstrap(values) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=1e-12)


def test_the_bootstrap_of_passages_draws_whole_ones():
    # of two passages only all, half or nothing can be drawn
    assert bootstrap([1.0, 1.0, 0.0, 0.0], list("aabb")) == [0.0, 1.0]
    wide, narrow = bootstrap([1.0, 0.0] * 50), bootstrap([1.0, 1.0, 0.0, 0.0] * 25, [
        str(n // 2) for n in range(100)])  # fmt: skip
    assert narrow[1] - narrow[0] > 1.2 * (wide[1] - wide[0])


def test_the_minimum_detectable_effect_is_found_in_four_of_five_trials():
    draw, error = np.random.default_rng(0), 0.02  # of 4 differences of 0.04 from their mean
    effect = minimum_detectable([0.54, 0.46, 0.54, 0.46])
    found = draw.normal(effect, error, 100_000)
    assert np.mean(np.abs(found) > 1.959964 * error) == pytest.approx(0.8, abs=0.005)


def test_holm_steps_down_and_never_back():
    adjusted = holm({"a": 0.04, "b": 0.01, "c": 0.03})
    assert adjusted == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert list(adjusted) == ["a", "b", "c"]
    assert holm({"x": 0.9, "y": 0.8}) == {"x": 1.0, "y": 1.0}


def test_a_comparison_is_of_pairs():
    a, b = [True] * 30 + [False] * 20, [True] * 30 + [True] * 12 + [False] * 8
    found = compare_accuracies(a, b)
    assert found.difference == pytest.approx(0.24)
    assert found.p_value == pytest.approx(2 / 2**12)
    assert found.interval[0] > 0
