"""Reading traces, against traces small enough to add up by hand (microseconds in, seconds out)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtcli.core.report import trace


def event(name, ts, dur, cat="cpu_op", tid=1):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


POINTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def covered(pairs):
    return {i for a, b in pairs for i in range(a, b)}


@given(POINTS)
def test_a_union_covers_the_same_points_once(pairs):
    pairs = [(min(p), max(p)) for p in pairs]
    found = trace.union(pairs)
    assert covered(found) == covered(pairs)
    assert trace.length(found) == len(covered(pairs))
    assert all(a[1] < b[0] for a, b in zip(found, found[1:], strict=False))


@given(POINTS, POINTS)
def test_what_two_unions_share_is_the_intersection_of_their_points(a, b):
    a = trace.union((min(p), max(p)) for p in a)
    b = trace.union((min(p), max(p)) for p in b)
    assert trace.length(trace.common(a, b)) == len(covered(a) & covered(b))


def test_an_operators_own_time_leaves_out_those_it_calls():
    events = [
        event("aten::linear", 0, 100),
        event("aten::mm", 10, 60),
        event("aten::add", 80, 10),
        event("aten::mm", 200, 40),
        event("aten::mm", 0, 5, tid=2),
    ]
    assert trace.kernels(events) == [
        ("aten::mm", 3, pytest.approx(105e-6)),
        ("aten::linear", 1, pytest.approx(30e-6)),
        ("aten::add", 1, pytest.approx(10e-6)),
    ]


def test_on_a_gpu_kernels_are_the_devices():
    events = [event("aten::mm", 0, 9), event("sm90_gemm", 5, 50, cat="kernel", tid=7)]
    assert trace.kernels(events) == [("sm90_gemm", 1, pytest.approx(50e-6))]
    nccl = event("ncclDevKernel_AllReduce", 20, 60, cat="kernel", tid=8)
    assert trace.length(trace.computing([*events, nccl])) == pytest.approx(50e-6)
    assert trace.exchanges([*events, nccl]) == {nccl["name"]: pytest.approx(60e-6)}


def test_waiting_inside_an_operator_that_communicates_is_not_computing():
    events = [
        event("CollectiveBackward", 0, 100),
        event("c10d::allreduce_", 5, 10),
        event("aten::copy_", 20, 15),
        event("MmBackward0", 100, 50),
        event("gloo:all_reduce", 10, 80, cat="user_annotation", tid=9),
    ]
    assert trace.computing(events) == [(pytest.approx(20e-6), pytest.approx(35e-6)), (1e-4, 1.5e-4)]
    assert trace.exchanges(events) == {"gloo:all_reduce": pytest.approx(80e-6)}


def test_a_send_that_nobody_took_yet_is_not_waited_for():
    send, receive = (event(f"gloo:{n}", 0, 10, cat="user_annotation") for n in ("send", "recv"))
    assert trace.exchanges([send, receive]) == {"gloo:recv": pytest.approx(10e-6)}


def test_memory_adds_up_from_the_beginning_of_the_step():
    def memory(ts, count):
        return {"ph": "i", "name": "[memory]", "ts": ts, "args": {"Bytes": count}}

    events = [memory(5e6, 100), memory(12e6, -30), memory(11e6, 50), event("aten::mm", 0, 1)]
    assert trace.memory_curve(events, begin=10.0) == [(0.0, 0), (1.0, 50), (2.0, 20)]


def test_thinning_a_curve_keeps_its_peak():
    curve = [(float(i), i if i != 617 else 10**6) for i in range(5000)]
    found = trace.thinned(curve, 100)
    assert len(found) == 100
    assert (617.0, 10**6) in found
