"""A run's days, GPU-hours, money and energy are its steps'; the least is a brute force's."""

import json
import re

import pytest

from mtcli.core.config.loading import load_config
from mtcli.core.config.schema import TrainConfig
from mtcli.core.plan.answer import answer, read_request, with_run
from mtcli.core.plan.budget import RunTotals, budget_of, budget_rows
from mtcli.core.plan.certainty import step_range
from mtcli.core.plan.interruptions import HERE, Assumed
from mtcli.core.plan.predict import predict

TOKENS = 300e9
# One save, in no time, and no failures.
STEPS = {
    "train": TrainConfig(save_minutes=0),
    "assumed": Assumed(storage=1e15, copy=1e15, failures=0.0, pue=1.5),
}


def planned(device="h100", world=8):
    config = load_config("gpt2-345m", [f"batch.global_batch_size={64}", "train.precision=bf16"])
    return predict(config, world, device)


def test_a_run_is_its_tokens_over_the_rate_of_all_devices():
    p = planned()
    found = budget_of(p, RunTotals(TOKENS, 2.5, **STEPS))
    seconds = TOKENS / (8 * p.tokens_per_second_per_gpu)
    assert found["days"]["planned"] == pytest.approx(seconds / 86400)
    assert found["gpu_hours"]["planned"] == pytest.approx(8 * seconds / 3600)
    assert found["money"]["planned"] == pytest.approx(2.5 * 8 * seconds / 3600)
    assert found["kwh"]["planned"] == pytest.approx(1.5 * 0.7 * 8 * seconds / 3600)
    assert found["steps"] * 64 * p.work.seq_len == pytest.approx(TOKENS)


def test_every_figure_has_the_range_of_the_steps_seconds():
    p = planned()
    found, spread = budget_of(p, RunTotals(TOKENS, 2.5, **STEPS)), step_range(p)
    for name in ("days", "gpu_hours", "money", "kwh"):
        figure = found[name]
        assert figure["low"] / figure["planned"] == pytest.approx(spread.low / p.step_seconds)
        assert figure["high"] / figure["planned"] == pytest.approx(spread.high / p.step_seconds)
    words = " ".join(" ".join(row) for row in budget_rows(p, RunTotals(TOKENS, 2.5)))
    assert "3e+11 tokens in 4,577,637 steps" in words and "in money, at 2.5 an hour (" in words


def test_without_a_price_or_a_power_limit_there_is_no_money_and_no_energy():
    found = budget_of(planned("cpu", 1), RunTotals(TOKENS))
    assert found["money"] is None and found["kwh"] is None and found["days"]["low"] is None


@pytest.mark.parametrize("goal", ["money", "energy"])
def test_a_search_for_the_least_money_is_a_brute_force_over_counts(goal):
    def asked(world):
        return read_request("gpt2-345m", ["batch.global_batch_size=256"], [], world, "h100")

    best = answer(with_run(asked(64), f"{TOKENS}", 2.5, goal), 1)
    hours = {}
    for world in (64, 32, 16, 8, 4, 2, 1):
        p = answer(asked(world), 1).prediction
        hours[world] = budget_of(p, RunTotals(TOKENS))["gpu_hours"]["planned"]
    chosen = best.prediction.work.layout.world
    assert hours[chosen] == min(hours.values()) < hours[64]
    assert f"least {goal} of 64, 32, 16" in best.search_title
    assert budget_of(best.prediction, best.budget)["money"]["planned"] == 2.5 * hours[chosen]


def test_the_tokens_of_a_run_are_by_default_those_of_its_steps():
    request = read_request("tiny", ["train.steps=7"], [], None, "cpu")
    batch = request.config.batch
    budget = with_run(request, None, 1.0, "time").budget
    tokens = 7 * batch.global_batch_size * batch.seq_len
    assert budget == RunTotals(tokens, 1.0, request.config.train, HERE)
    assert with_run(request, None, None, "time").budget is None
    changed = with_run(request, None, None, "time", ["pue=2"]).budget
    assert changed == budget._replace(price=None, assumed=HERE._replace(pue=2.0))


def test_evaluations_saves_and_failures_make_a_run_longer():
    p, often = planned(), TrainConfig(eval_every=10, eval_batches=5, save_minutes=0)
    steps = budget_of(p, RunTotals(TOKENS, **STEPS))
    evaluated = budget_of(p, RunTotals(TOKENS, **STEPS | {"train": often}))
    longer = evaluated["days"]["planned"] / steps["days"]["planned"]
    assert longer == pytest.approx(1 + 0.5 * p.evaluation_seconds / p.step_seconds)
    # a failure in 2.1 days of 8 GPUs at 60 a day of 1,000, each of half the run
    failing = STEPS | {"assumed": STEPS["assumed"]._replace(failures=60.0, restart=0.0)}
    found = budget_of(p, RunTotals(TOKENS / 10, **failing))
    days = steps["days"]["planned"] / 10
    assert found["failures"]["per_day"] == pytest.approx(0.48)
    assert found["days"]["planned"] == pytest.approx(days / (1 - 0.48 * days / 2), rel=1e-4)
    assert found["failures"]["count"] == pytest.approx(0.48 * found["days"]["planned"])
    lost = found["failures"]["lost_seconds"] / 86400
    assert lost == pytest.approx(found["days"]["planned"] - days, rel=1e-4)


def test_rows_say_what_saves_and_failures_cost_and_what_would_cost_less():
    words = dict(filter(lambda row: row[0], budget_rows(planned(), RunTotals(TOKENS))))
    assert words["checkpoints"] == "280 of 4.97 GB, every 30 min"
    assert words["failures"].startswith("0.00379 a day, 0 in all, at 0.47 a day of 1,000 devices")
    assert re.fullmatch(
        r"train.save_minutes=[\d.]+ \(Young\), 0.0% less time", words["best interval"]
    )
    never = Assumed(failures=1e6)
    words = dict(budget_rows(planned(), RunTotals(TOKENS, assumed=never)))
    assert "the run never ends at" not in words["failures"] and "never ends" in words["failures"]
    found = budget_of(planned(), RunTotals(TOKENS, assumed=never))
    assert found["days"]["planned"] is None and found["failures"]["count"] is None
    json.dumps(found, allow_nan=False)


def test_counts_of_devices_are_searched_below_a_number_that_is_said():
    request = with_run(read_request("tiny", [], [], None, "cpu"), None, 1.0, "money")
    assert [problem.field for problem in request.problems] == ["--gpus"]
