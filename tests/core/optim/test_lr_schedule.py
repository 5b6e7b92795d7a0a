import math

import pytest

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.optim.lr_schedule import learning_rate

LR, MIN = 1e-3, 1e-4


def curve(steps, **fields):
    config = OptimizerConfig(lr=LR, min_lr=MIN, **fields)
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_the_warm_up_is_a_line_from_zero_that_reaches_the_peak_at_its_last_step(schedule):
    rates = curve(20, schedule=schedule, warmup_steps=5)
    assert rates[:5] == pytest.approx([LR * n / 5 for n in range(1, 6)])
    assert max(rates) == pytest.approx(LR)


def test_constant_stays():
    assert curve(9, schedule="constant") == [LR] * 9


def test_linear_falls_in_equal_steps_to_the_end():
    rates = curve(10, schedule="linear", warmup_steps=2)
    assert rates[2:] == pytest.approx([LR - (LR - MIN) * n / 8 for n in range(1, 9)])


def test_cosine_has_its_closed_form():
    rates = curve(10, schedule="cosine", warmup_steps=2)
    expected = [MIN + (LR - MIN) * (1 + math.cos(math.pi * n / 8)) / 2 for n in range(1, 9)]
    assert rates[2:] == pytest.approx(expected)
    assert rates[5] == pytest.approx((LR + MIN) / 2)  # half way


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_shorter_than_the_run_ends_at_the_minimum_and_stays(schedule):
    rates = curve(20, schedule=schedule, warmup_steps=2, decay_steps=6)
    assert rates[7:] == pytest.approx([MIN] * 13)
    assert rates[6] > MIN


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_decay_longer_than_the_run_is_the_beginning_of_one_of_that_length(schedule):
    settings = {"schedule": schedule, "warmup_steps": 2, "decay_steps": 900}
    assert curve(9, **settings) == curve(902, **settings)[:9]
    assert curve(9, **settings)[-1] > 0.98 * LR


def test_wsd_stays_at_the_peak_until_its_final_decay():
    rates = curve(10, schedule="wsd", warmup_steps=2, decay_steps=4)
    assert rates[1:6] == pytest.approx([LR] * 5)
    assert rates[6:] == pytest.approx([LR - (LR - MIN) * n / 4 for n in range(1, 5)])


def test_a_run_that_is_all_warm_up_never_decays():
    assert curve(3, schedule="cosine", warmup_steps=3)[-1] == LR
