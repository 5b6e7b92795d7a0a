"""The plan of phases: each is that of a config with its settings, and a run is their sum."""

import math

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config, table_of
from mtcli.core.mesh.parameters import count_parameters
from mtcli.core.plan.answer import answer, read_request, with_run
from mtcli.core.plan.budget import budget_of, phase_rows
from mtcli.core.plan.predict import predict

RUN = [
    "optimizer.warmup_steps=0",
    "train.precision=bf16",
    "batch.seq_len=1024",
    "batch.global_batch_size=64",
]
LATER = ["batch.seq_len=4096", "batch.global_batch_size=128", "batch.micro_batch_size=2"]
PHASES = ["phase.0.from_tokens=1000000", *(f"phase.0.{setting}" for setting in LATER)]


def asked(*settings, tokens="4e6", price=None, assume=("failures=0,storage=1e15,copy=1e15",)):
    table = table_of("llama-3.1-8b", [*RUN, "parallel.zero=3", *PHASES, *settings])
    return with_run(read_request(table, [], [], 8, "h100"), tokens, price, "time", assume)


def test_a_phase_costs_what_a_run_of_its_settings_does_and_a_run_the_sum():
    found = answer(asked(price=2.0), None)
    first, second = found.phases
    bare = ["parallel.zero=3", *RUN]
    for one, settings in ((first, bare), (second, [*bare, *LATER])):
        alone = predict(load_config("llama-3.1-8b", settings), 8, "h100")
        assert one.prediction.step_seconds == alone.step_seconds
        assert one.prediction.memory.total == alone.memory.total
    # 16 steps of 65,536 tokens pass 1e6, and 6 of 524,288 the other 2,951,424.
    assert (first.steps, second.steps) == (16, 6)
    seconds = 16 * first.prediction.step_seconds + 6 * second.prediction.step_seconds
    budget = budget_of(found.prediction, found.budget)
    assert budget["days"]["planned"] == pytest.approx(seconds / 86400)
    assert budget["money"]["planned"] == pytest.approx(2.0 * 8 * seconds / 3600)
    assert budget["steps"] == 22
    rows = phase_rows(found.phases)
    assert [row[4].endswith(" *") for row in rows] == [False, True, False]
    assert rows[-1][:3] == ["all", "22", f"{16 * 65536 + 6 * 524288:,}"]


def test_saves_and_evaluations_of_all_phases_are_in_the_time():
    settings = ["train.eval_every=2", "train.eval_batches=3", "train.save_every=4"]
    assume = ("failures=0", "copy=10", "storage=1000")
    found = answer(asked(*settings, "train.save_minutes=0", assume=assume), None)
    steps, evaluated = (16, 6), [one.prediction.evaluation_seconds for one in found.phases]
    assert evaluated[1] > evaluated[0] > 0
    training = sum(
        n * one.prediction.step_seconds for n, one in zip(steps, found.phases, strict=True)
    )
    seconds = training + sum(n / 2 * 3 * each for n, each in zip(steps, evaluated, strict=True))
    saves = math.ceil(seconds / (4 * training / 22))
    stall = found.prediction.memory.host / 10e9
    budget = budget_of(found.prediction, found.budget)
    assert budget["checkpoints"]["count"] == saves > 5
    written = budget["checkpoints"]["write_seconds"]
    assert written == pytest.approx(14 * count_parameters(found.config.model) / 1e12)
    assert budget["days"]["planned"] == pytest.approx((seconds + saves * stall) / 86400)
    averaged = answer(asked(*settings, "train.ema=0.99", assume=assume), None)
    with_average = budget_of(averaged.prediction, averaged.budget)["checkpoints"]["write_seconds"]
    assert with_average == pytest.approx(written * 18 / 14)


def test_a_run_does_not_fit_where_its_largest_phase_does_not():
    found = answer(asked("phase.0.batch.micro_batch_size=16"), None)
    assert found.prediction.fits and not found.fullest.fits
    with pytest.raises(MtcliError, match=r"a rank needs .* and can use"):
        found.require_fit()
