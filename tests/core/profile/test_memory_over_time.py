"""Bytes by how long they live, against a step of two ops drawn by hand."""

import pytest

from mtcli.core.profile.records import MemorySample
from mtcli.core.profile.summary import allocations, over_time, thinned


def memory(ts, count, address=1, device=0, thread=0):
    args = {"Bytes": count, "Addr": address, "Device Type": device}
    return {"ph": "i", "name": "[memory]", "ts": ts * 1e6, "tid": thread, "args": args}


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


def ranged(name, start, seconds):
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": seconds * 1e6, "tid": 0}


REDUCED = [
    ranged("FSDP::post_backward_reduce", 11.0, 2.0),
    ranged("c10d::_reduce_scatter_base_", 11.2, 0.5),
    memory(11.3, 100, address=2),
    memory(11.4, 7, address=3, thread=1),
    memory(11.8, 9, address=4),
]
GATHERED = [
    ranged("FSDP::all_gather (blocks.1)", 11.0, 0.5),
    memory(11.1, 100, address=2),
    ranged("c10d::_allgather_base_", 11.2, 0.1),
    ranged("FSDP::all_gather_copy_out (blocks.0)", 12.0, 0.5),
    ranged("FSDP::all_gather_copy_out (blocks.1)", 13.0, 0.5),
    ranged("FSDP::all_gather_copy_out (blocks.1)", 15.0, 0.5),
]


@pytest.mark.parametrize(("events", "end"), [(REDUCED, 3.0), (GATHERED, 3.5)])
def test_a_collectives_buffer_that_gloo_s_thread_releases_ends_with_its_use(events, end):
    def ends(*more):
        return [a.end for a in allocations([*events, *more], begin=10.0) if a.bytes == 100]

    assert ends() == [end]
    assert ends(memory(12.0, -100, address=2)) == [2.0]  # the profiler saw it
    assert ends(memory(12.5, 30, address=2)) == [2.5]  # given out again


def test_what_nobody_releases_is_held_to_the_end():
    held = [a.bytes for a in allocations(REDUCED, begin=10.0) if a.end == float("inf")]
    assert held == [7, 9]  # of another thread, and after the collective


def test_thinning_a_curve_keeps_its_peak():
    long = [MemorySample(float(i), 1, 10**6 if i == 617 else i) for i in range(5000)]
    found = thinned(long, 100)
    assert len(found) == 100
    assert MemorySample(617.0, 1, 10**6) in found


@pytest.mark.parametrize("points", [1, 7, 5000, 9000])
def test_a_thinned_curve_has_at_most_the_points_that_were_asked_for(points):
    assert len(thinned([MemorySample(float(i), i, 0) for i in range(5000)], points)) <= points
