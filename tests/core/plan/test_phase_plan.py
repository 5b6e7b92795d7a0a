"""The plan of phases: each is that of a config with its settings, and a run is their sum."""

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config, table_of
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


def asked(*settings, tokens=4e6, price=None):
    table = table_of("llama-3.1-8b", [*RUN, "parallel.zero=3", *PHASES, *settings])
    return with_run(read_request(table, [], [], 8, "h100"), tokens, price, "time")


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


def test_a_run_does_not_fit_where_its_largest_phase_does_not():
    found = answer(asked("phase.0.batch.micro_batch_size=16"), None)
    assert found.prediction.fits and not found.fullest.fits
    with pytest.raises(MtcliError, match=r"a rank needs .* and can use"):
        found.require_fit()
