"""Clocks of ranks: shared on one machine, compared at barriers on two."""

import pytest
import torch

from mtcli.core.parallel.groups import Axis
from mtcli.core.profile.clock import (
    DeviceClock,
    HostClock,
    clock_for,
    clock_offset,
    offset_between,
    op_range,
)
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.schedule.ops import Op


def test_processes_of_one_machine_share_a_clock():
    assert offset_between(("host", [1.0, 2.0]), ("host", [7.0, 8.0])) == 0.0


def test_another_machines_clock_is_set_by_the_barriers_both_left():
    first, mine = ("a", [10.0, 11.0, 12.5]), ("b", [3.0, 3.5, 5.5])
    assert offset_between(first, mine) == pytest.approx(7.0)  # one late barrier of three


def test_a_rank_alone_is_on_its_own_clock():
    assert clock_offset(Axis("world", (0,), 0, None, FlightRecorder())) == 0.0


def test_the_hosts_stamps_are_seconds_in_order():
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    clock.begin()
    first, second = clock(), clock()
    clock.end()
    assert clock.seconds(first) <= clock.seconds(second)


def test_on_a_gpu_every_op_is_an_nvtx_range_by_its_name(monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    around = op_range(torch.device("cuda"))
    with around(Op("B", 3, 1)):
        told.append("inside")
    assert told == ["B3.1", "inside", "end"]


def test_on_a_cpu_an_op_runs_in_no_range(monkeypatch):
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pytest.fail)
    with op_range(torch.device("cpu"))(Op("F", 0, 0)):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_devices_stamps_are_when_its_work_was_done():
    from time import perf_counter

    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, DeviceClock)
    a = torch.randn(8192, 8192, device="cuda")
    clock.begin()
    start, before = perf_counter(), clock()
    for _ in range(20):
        a @ a
    after = clock()
    clock.end()
    elapsed = perf_counter() - start
    assert clock.seconds(after) - clock.seconds(before) == pytest.approx(elapsed, rel=0.2)
