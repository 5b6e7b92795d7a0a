"""Reading traces, against traces small enough to add up by hand (microseconds in, seconds out)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtcli.core.profile import intervals, trace


def event(name, ts, dur, cat="cpu_op", tid=1):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


POINTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def covered(pairs):
    return {i for a, b in pairs for i in range(a, b)}


@given(POINTS)
def test_a_union_covers_the_same_points_once(pairs):
    pairs = [(min(p), max(p)) for p in pairs]
    found = intervals.union(pairs)
    assert covered(found) == covered(pairs)
    assert intervals.length(found) == len(covered(pairs))
    assert all(a[1] < b[0] for a, b in zip(found, found[1:], strict=False))


@given(POINTS, POINTS)
def test_what_two_unions_share_is_the_intersection_of_their_points(a, b):
    a = intervals.union((min(p), max(p)) for p in a)
    b = intervals.union((min(p), max(p)) for p in b)
    assert intervals.length(intervals.common(a, b)) == len(covered(a) & covered(b))


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
    assert intervals.length(trace.computing([*events, nccl])) == pytest.approx(50e-6)
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


def test_points_without_others_are_those_of_one_set_alone():
    assert intervals.without([(0, 5), (7, 9)], [(1, 2), (4, 8)]) == [(0, 1), (2, 4), (8, 9)]
    assert intervals.without([(0, 5)], []) == [(0, 5)]


def test_nccls_kernels_are_counted_by_the_axis_of_their_communicator():
    kernel = event("ncclDevKernel_AllGather", 0, 30, cat="kernel")
    events = [kernel | {"args": {trace.GROUP: axis}} for axis in ("tp", "data", "tp")]
    assert trace.seconds_by_axis([*events, event("aten::mm", 0, 9)]) == {
        "tp": pytest.approx(60e-6),
        "data": pytest.approx(30e-6),
    }


def test_the_host_s_ops_are_read_from_their_annotations():
    first, second = event(trace.OP + "F0.0", 2e6, 1e6), event(trace.OP + "B0.0", 3e6, 2e6)
    on_device = event(trace.OP + "F0.0", 9e6, 1e6, cat="gpu_user_annotation")
    events = [one | {"cat": "user_annotation"} for one in (second, first)]
    assert trace.op_bounds([*events, on_device], begin=2.0) == [0.0, 1.0, 1.0, 3.0]


def test_sharding_moves_all_but_this_ranks_part():
    def collective(name, at, out, given, kind):
        found = event(f"c10d::{name}_base_", at, 1)
        return found | {"args": {"Input Dims": [[out], [given]], "Input type": [kind, kind]}}

    events = [
        event("FSDP::all_gather (blocks.0)", 0, 10, cat="cpu_op"),
        collective("_allgather", 5, 400, 100, "c10::BFloat16"),
        event("FSDP::post_backward_reduce (blocks.0.mlp.experts)", 20, 10),
        collective("_reduce_scatter", 25, 100, 400, "float"),
        collective("_allgather", 40, 400, 100, "float"),  # not of FSDP
        event("FSDP::pre_backward (blocks.1.mlp.experts)", 50, 10),
        event("FSDP::all_gather (blocks.0)", 52, 6),  # prefetched there
        collective("_allgather", 55, 40, 10, "double"),
    ]
    assert trace.sharding_bytes(events) == [("data", 600), ("edp", 1200), ("data", 240)]
