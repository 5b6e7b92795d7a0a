"""Seconds that ranks compute and wait, as metrics tell them."""

import pytest
from ranks import run_ranks

from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import world_axis
from mtcli.core.parallel.health.flight_recorder import FlightRecorder
from mtcli.core.training.rank_times import RankTimes, StepTimer, rank_times


def test_a_row_names_the_largest_the_median_and_whose_the_largest_is():
    times = RankTimes([1.0, 3.0, 2.0], [0.5, 0.1, 0.4])
    assert times.row() == {
        "computing_seconds_max": 3.0,
        "computing_seconds_median": 2.0,
        "computing_rank_max": 1,
        "waiting_seconds_max": 0.5,
        "waiting_seconds_median": 0.4,
        "waiting_rank_max": 0,
    }


def test_steps_are_told_as_their_mean_once_and_what_is_waited_between_them_is_of_none():
    recorder = FlightRecorder()
    timer = StepTimer(recorder, rank=1, world=2)
    for waited, seconds in [(0.25, 1.0), (0.75, 2.0)]:
        recorder.waited += 5.0
        timer.begin()
        recorder.waited += waited
        timer.end(seconds)
    assert timer.taken() == [0.0, 1.0, 0.0, 0.5]
    assert timer.taken() == [0.0] * 4


def test_one_rank_waits_for_none_and_steps_between_two_logs_tell_nothing():
    assert rank_times([1.0, 0.0]) is None and rank_times([]) is None
    assert rank_times([1.0, 2.0, 3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


def in_a_collective(runtime):
    """Seconds of rank 0's own and of its peer, which comes later by 0.3 s."""
    import time

    import torch

    axis = world_axis(runtime.rank, runtime.world, runtime.recorder)
    from mtcli.core.parallel.groups import _connected

    axis = _connected(axis, 60.0)
    all_reduce(torch.zeros(1), axis)
    timer = StepTimer(runtime.recorder, runtime.rank, runtime.world)
    timer.begin()
    start = time.perf_counter()
    time.sleep(0.3 * runtime.rank)
    all_reduce(torch.zeros(1), axis)
    timer.end(time.perf_counter() - start)
    told = timer.taken()
    return told[runtime.rank], told[2 + runtime.rank]


def test_a_rank_that_comes_late_computes_and_its_peer_waits():
    (early, waits), (late, no_wait) = run_ranks(2, in_a_collective)
    assert late == pytest.approx(0.3, abs=0.1) and waits == pytest.approx(0.3, abs=0.1)
    assert early < 0.1 and no_wait < 0.1
