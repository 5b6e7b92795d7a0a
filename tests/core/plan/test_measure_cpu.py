"""Measuring a machine: what is fitted is found again, and every part of the engine answers."""

import json
import os
import signal
import sys

import numpy as np
import pytest
from ranks import run_ranks

from mtcli.core.config.loading import load_config
from mtcli.core.plan import measure_cpu
from mtcli.core.plan.calibration import BUDGET, Calibration, facts_of
from mtcli.core.plan.measure_cpu import (
    ProbeShape,
    Timed,
    calibrate,
    least_squares,
    run_config,
    typical,
)

SHAPES = [
    ProbeShape(64, 1, 64, 16, 2),
    ProbeShape(64, 2, 128, 32, 2),
    ProbeShape(128, 1, 64, 16, 4, 8),
]


def test_least_squares_finds_the_costs_that_made_the_seconds():
    counts = np.random.default_rng(1).integers(1, 1000, (12, 4)) * np.array([1, 1e3, 1e6, 1e9])
    counts[:, 2] = 0
    costs = np.array([1e-3, 2e-6, 0.0, 3e-12])
    fixed = np.linspace(0.0, 1.0, 12)
    found = least_squares(counts, fixed + counts @ costs, fixed)
    assert found == pytest.approx(list(costs), rel=1e-9)


def test_nothing_costs_less_than_nothing():
    counts = [[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]]
    found = least_squares(counts, [1.0, 0.9, 0.7], [0.0] * 3)
    assert found[1] == 0.0 and 0.7 < found[0] < 1.0


def of_one_rank(runtime):
    seconds = [(1.0, 9.0, 2.0, 3.0), (2.0, 1.0, 2.0, 8.0)][runtime.rank]
    steps = [Timed(None, second, 2 * second, 0.5, 0.25) for second in seconds]
    return list(typical([steps[:2], steps[2:]]))


def test_a_step_takes_its_median_on_the_rank_that_each_time_was_the_slowest():
    """Slowest: 2, 9, 2 and 8 s. The slower of the ranks' own medians would be 2.5 s."""
    assert run_ranks(2, of_one_rank) == [[None, 5.0, 10.0, 0.5, 0.25]] * 2


@pytest.mark.parametrize("preset", ["tiny", "mixtral-8x7b"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_measured_model_is_of_the_kind_and_shape_asked_for(preset, shape):
    wanted = load_config(preset, ["model.head_dim=32"]).model
    model = run_config(facts_of(load_config(preset, ["model.head_dim=32"]), 1), shape).model
    assert (model.hidden_size, model.num_layers, model.vocab_size) == shape[:3]
    for name in ("activation", "norm", "position", "bias", "head_dim"):
        assert getattr(model, name) == getattr(wanted, name), name
    assert model.num_experts == (shape.experts if wanted.num_experts else 0)


@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_a_measured_model_is_updated_as_the_run_is(rule):
    facts = facts_of(load_config("tiny", [f"optimizer.name={rule}"]), 1)
    assert run_config(facts, SHAPES[0]).optimizer.name == rule


def test_two_ranks_measure_every_number_of_a_mixture():
    for found in run_ranks(2, _calibrate):
        assert Calibration.of(json.loads(json.dumps(found))).ranks == 2
        numbers = [found["flops"], found["memory_bandwidth"], found["overhead"]]
        numbers += [x for row in found["attention"] for x in row[:3]]
        numbers += [
            a + b for row in found["attention"] for a, b in ((row[3], row[5]), (row[4], row[6]))
        ]
        assert all(number > 0 for number in numbers)
        assert sum(found["forward"]) > 0 and sum(found["backward"]) > 0
        assert all(sum(link) > 0 for link in found["links"].values())


def _calibrate(runtime):
    measure_cpu.LENGTHS, measure_cpu.SCORES, measure_cpu.SIDE = (16, 32), 2**10, 64
    config = load_config("mixtral-8x7b", ["model.head_dim=32", "train.precision=fp32"])
    facts = facts_of(config, 2) | {"ranks": 2}
    return calibrate(facts, runtime.rank, 2, BUDGET, SHAPES).as_json()


def test_nothing_more_is_begun_when_the_share_is_used():
    facts = facts_of(load_config("tiny"), 1)
    with pytest.raises(RuntimeError, match=r"20 s of processor time were enough for 0 of 3 models"):
        calibrate(facts, 0, 1, 1e-6, SHAPES)


def _end_of_a_process(runtime, folder):
    """(exit code, processor seconds) of a process that measures forever on a share of 0.2 s."""
    process = os.fork()
    if not process:
        try:
            os.dup2(os.pipe()[0], 0)  # whose other end this process holds open
            sys.argv = ["", json.dumps(facts_of(load_config("tiny"), 1)), folder]
            measure_cpu.BUDGET = 0.2
            measure_cpu.calibrate = lambda *_: [None for _ in iter(int, 1)]
            with open(0) as sys.stdin:
                measure_cpu.main()
        finally:
            os._exit(1)
    _, status, used = os.wait4(process, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def test_a_process_ends_when_its_processor_time_is_used(tmp_path):
    """As the system counts it, whatever the machine does besides."""
    ((code, used),) = run_ranks(1, _end_of_a_process, str(tmp_path))
    assert code == -signal.SIGPROF
    assert 0.15 < used < 0.4
