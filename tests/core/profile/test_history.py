"""A run's steps as curves: each step once, thinned without losing a spike."""

import math

import pytest

from mtcli.core.profile.curves import Curve, curves_of, histogram, quantiles, thinned
from mtcli.core.profile.finished_run import once


def test_steps_that_were_run_twice_count_as_they_were_run_last():
    rows = [{"step": s, "loss": float(s)} for s in (1, 2, 3, 4)]
    again = [{"step": s, "loss": 10.0 * s} for s in (3, 4, 5)]
    found, resumed = once([*rows, *again])
    assert [row["loss"] for row in found] == [1.0, 2.0, 30.0, 40.0, 50.0]
    assert resumed == [3]


def test_a_thinned_curve_keeps_spikes_ends_and_order():
    values = [1.0] * 100_000
    values[31_417], values[27_182] = 99.0, -5.0
    found = thinned(Curve(list(range(100_000)), values))
    assert len(found.steps) <= 2002
    assert {0, 31_417, 27_182, 99_999} <= set(found.steps)
    assert found.steps == sorted(set(found.steps))
    assert [values[step] for step in found.steps] == found.values


def test_a_stretch_without_a_number_stays_a_gap():
    values = [math.nan if 500 <= i < 700 else 1.0 for i in range(10_000)]
    found = thinned(Curve(list(range(10_000)), values), points=200)
    assert any(math.isnan(value) for value in found.values)


def test_a_short_curve_is_whole():
    whole = Curve([1, 2, 3], [1.0, math.nan, 2.0])
    assert thinned(whole) is whole


def test_curves_have_units_and_leave_out_what_no_step_has():
    rows = [{"step": 1, "loss": math.nan, "mfu": 0.25}, {"step": 2, "loss": 3.0, "mfu": 0.5}]
    assert curves_of(rows) == {
        "loss": {"steps": [1, 2], "values": [None, 3.0]},
        "MFU (%)": {"steps": [1, 2], "values": [25.0, 50.0]},
    }


def test_each_validation_set_and_task_has_a_curve_by_its_name():
    row = {
        "step": 4,
        "loss": 3.0,
        "valid_loss": 2.5,
        "valid_loss/code": 2.0,
        "valid_loss/wiki": 3.0,
    }
    found = curves_of([{"step": 2, "loss": 4.0}, row | {"eval/lambada/accuracy": 0.5}])
    del found["loss"]
    assert {name: (curve["steps"], curve["values"]) for name, curve in found.items()} == {
        "validation loss": ([4], [2.5]),
        "validation loss code": ([4], [2.0]),
        "validation loss wiki": ([4], [3.0]),
        "eval/lambada/accuracy": ([4], [0.5]),
    }


def test_quantiles_are_values_that_occur():
    assert quantiles([float(i) for i in range(100)]) == {"p5": 5.0, "p50": 50.0, "p95": 95.0}
    assert quantiles([7.0]) == {"p5": 7.0, "p50": 7.0, "p95": 7.0}


@pytest.mark.parametrize("values", [[2.0], [1.0, 2.0, 3.0], [1.0] * 99 + [500.0]])
def test_a_histogram_has_every_value_in_a_bin(values):
    starts, counts, width = histogram(values)
    assert sum(counts) == len(values)
    assert width > 0 and starts[0] == min(values)


def test_what_lies_beyond_the_99th_percentile_is_in_the_last_bin():
    starts, counts, width = histogram([i / 1000 for i in range(1000)] + [500.0])
    assert starts[-1] + width == pytest.approx(0.99, rel=0.01)
    assert counts[-1] >= 10
