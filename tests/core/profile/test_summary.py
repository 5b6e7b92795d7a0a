"""What a trace and the host's waits tell of a step, against intervals drawn by hand."""

import pytest
from handmade import step_of

from mtcli.core.profile import trace
from mtcli.core.profile.summary import shares_inside, summarized, waiting_of
from mtcli.core.runtime.health.traffic import Traffic, WaitInterval


def waits(*intervals):
    traffic = Traffic()
    traffic.waits += [WaitInterval("tp", "all_reduce", a, b) for a, b in intervals]
    return traffic


def event(name, start, seconds, cat="cpu_op"):
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": seconds * 1e6, "cat": cat, "tid": 1}


def test_a_share_is_of_the_seconds_of_its_kind():
    ops = [("F", 0.0, 2.0), ("B", 2.0, 6.0), ("F", 6.0, 8.0)]
    assert shares_inside(ops, [(1.0, 3.0), (7.5, 9.0)]) == {"F": 1.5 / 4.0, "B": 1.0 / 4.0}


def test_waits_count_inside_the_ops_of_their_step_and_by_axis():
    # Ops of rank 0 begin at 0.5, on a clock that is 100 s ahead of the host's.
    traffic = waits((-99.0, -98.5), (-94.5, -94.0), (-89.0, -88.0))
    found = waiting_of(step_of(0), traffic, offset=100.0)
    assert found.inside == pytest.approx({"F": 0.5 / 2.0, "B": 0.5 / 4.0})
    assert found.by_axis == {"tp": pytest.approx(2.0)}


def test_a_thread_that_waits_computes_nothing():
    # An operator from 1.5 to 2.5 s on the profiler's clock that waits for others from 2.0 on.
    events = [event(trace.STEP, 1.0, 12.0, "user_annotation"), event("Collective", 1.5, 1.0)]
    found = summarized({"traceEvents": events}, step_of(0), (0.0, 50.0), waits((51.0, 51.5)))
    assert found.exchanging == pytest.approx({"F": 0.5 / 2.0, "B": 0.0})
    assert found.overlapped == 0.0
    assert found.communication == {"all_reduce": pytest.approx(0.5)}


def test_an_exchange_beside_computation_is_hidden_and_no_part_of_an_op():
    events = [event(trace.STEP, 1.0, 12.0, "user_annotation"), event("aten::mm", 1.5, 1.0)]
    events.append(event("gloo:all_reduce", 2.0, 1.0, "user_annotation"))
    found = summarized({"traceEvents": events}, step_of(0), (0.0, 0.0), Traffic())
    assert found.overlapped == pytest.approx(0.5)
    assert found.exchanging["F"] == pytest.approx(0.5 / 2.0)
    assert found.communication == {"gloo:all_reduce": pytest.approx(1.0)}


def test_what_fsdp_gathers_is_communication_of_dp_beside_the_waits_of_other_axes():
    events = [event(trace.STEP, 1.0, 12.0, "user_annotation"), event("FSDP::all_gather", 1.5, 1.0)]
    for name, seconds in (("all_gather", 1.0), ("recv", 4.0)):
        events.append(event(f"gloo:{name}", 2.0, seconds, "user_annotation"))
    found = summarized({"traceEvents": events}, step_of(0), (0.0, 50.0), waits((51.0, 51.5)))
    assert found.by_axis == pytest.approx({"tp": 0.5, "data": 1.0})
