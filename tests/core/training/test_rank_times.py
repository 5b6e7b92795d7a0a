"""Seconds that ranks compute and wait, as metrics tell them."""

import time

import pytest
import torch
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis, _connected, make_groups, world_axis
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.training.rank_times import RankTimes, StepTimer, agreed, rank_times


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
    timer = StepTimer(Axis("world", (0, 1), 1, None, recorder))
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


LATE = 0.2  # seconds that rank 1 comes later


def in_a_collective(runtime):
    """(computed, waited, before, whole) of each of six steps of a rank: the seconds it is told,
    and those that the clock shows before its collective and in the whole step."""
    axis = _connected(world_axis(runtime.rank, runtime.world, runtime.recorder), 60.0)
    timer, steps = StepTimer(axis), []
    for _ in range(6):
        all_reduce(torch.zeros(1), axis)
        timer.begin()
        start = time.perf_counter()
        time.sleep(LATE * runtime.rank)
        before = time.perf_counter() - start
        all_reduce(torch.zeros(1), axis)
        whole = time.perf_counter() - start
        timer.end(whole)
        told = timer.taken()
        steps.append((told[runtime.rank], told[2 + runtime.rank], before, whole))
    return steps


def test_a_rank_that_comes_late_computes_and_its_peer_waits():
    """Time before a collective is computing, and the two kinds add up to the step. On a busy
    machine delays are longer, so one step of six has to show the delay as it is."""
    early, late = run_ranks(2, in_a_collective)
    for computed, waited, before, whole in early + late:
        assert computed >= before and computed + waited == pytest.approx(whole)
    expected = pytest.approx((0, LATE, LATE, 0), abs=0.2 * LATE)
    assert any((*mine[:2], *peers[:2]) == expected for mine, peers in zip(early, late, strict=True))


def test_one_rank_alone_asks_its_gpu_for_nothing_to_agree_with_itself():
    groups = make_groups(ParallelLayout(1), 0, torch.device("meta"))
    assert agreed(groups, True, False, 7) == (True, False, 7, None)
