"""Bytes by how long they live, against a step of two ops drawn by hand."""

import pytest

from mtcli.core.profile.records import MemorySample
from mtcli.core.profile.summary import allocations, over_time, thinned


def memory(ts, count, address=1, device=0):
    args = {"Bytes": count, "Addr": address, "Device Type": device}
    return {"ph": "i", "name": "[memory]", "ts": ts * 1e6, "args": args}


def curve(*events):
    return over_time(allocations(events, begin=10.0), bounds=[1.0, 3.0, 3.0, 5.0])


def test_what_outlives_its_op_is_an_activation_and_what_does_not_is_temporary():
    found = curve(
        memory(11.5, 100, address=1),
        memory(12.0, 30, address=2),
        memory(12.5, -30, address=2),
        memory(14.0, -100, address=1),
    )
    assert found == [(0.0, 0, 0), (1.5, 100, 0), (2.0, 100, 30), (2.5, 100, 0), (4.0, 0, 0)]


def test_an_address_that_is_used_again_is_another_allocation():
    found = curve(
        memory(11.5, 8), memory(12.0, -8), memory(12.5, 8), memory(14.0, -8), memory(20.0, 1)
    )
    assert found[1:4] == [(1.5, 0, 8), (2.0, 0, 0), (2.5, 8, 0)]


def test_what_was_held_before_the_step_counts_below_zero_when_it_goes():
    assert curve(memory(9.0, 50), memory(11.0, -50)) == [(0.0, 0, 0), (1.0, -50, 0)]


def test_on_a_gpu_the_hosts_memory_is_left_out():
    found = curve(memory(11.5, 100, device=1), memory(12.0, 7, address=2))
    assert found[-1] == (1.5, 100, 0)


def test_the_total_is_what_the_trace_adds_up_to():
    events = [memory(11.0, 50, 1), memory(12.0, 25, 2), memory(12.5, -25, 2), memory(13.5, 5, 3)]
    assert [held.total for held in curve(*events)] == [0, 50, 75, 50, 55]


def test_thinning_a_curve_keeps_its_peak():
    long = [MemorySample(float(i), 1, 10**6 if i == 617 else i) for i in range(5000)]
    found = thinned(long, 100)
    assert len(found) == 100
    assert MemorySample(617.0, 1, 10**6) in found


@pytest.mark.parametrize("points", [1, 7, 5000, 9000])
def test_a_thinned_curve_has_at_most_the_points_that_were_asked_for(points):
    assert len(thinned([MemorySample(float(i), i, 0) for i in range(5000)], points)) <= points
