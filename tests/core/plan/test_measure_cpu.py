"""What is measured of a processor has the size of a processor's, by its own time."""

from time import process_time

import pytest
from ranks import run_ranks

from mtcli.core.plan import measure_cpu


def _measured(runtime, precision):
    begin = process_time()
    facts = {"cores": 1, "ranks": 1, "precision": precision, "matmul": "fast"}
    return measure_cpu.measured(facts), process_time() - begin


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_rates_of_a_core_are_those_of_a_processor_and_take_few_seconds(precision):
    ((known, seconds),) = run_ranks(1, _measured, precision)
    assert 1e9 < known.flops < 1e13
    assert 1e8 < known.memory_bandwidth < 1e12
    assert 1e-11 < known.element < 1e-7
    assert 1e-7 < known.call < 1e-3
    assert 1e7 < known.socket < 1e12
    assert seconds < 5


def test_a_rate_is_of_the_quickest_try(monkeypatch):
    clock = iter([0.0, 0.0, 3.0, 3.0, 5.0, 5.5, 6.0, 9.0, 9.0])
    monkeypatch.setattr(measure_cpu, "thread_time", lambda: next(clock))
    monkeypatch.setattr(measure_cpu, "SECONDS", 6.0)
    monkeypatch.setattr(measure_cpu, "TRIES", 2)
    assert measure_cpu.seconds_of(lambda: None) == 2.0
