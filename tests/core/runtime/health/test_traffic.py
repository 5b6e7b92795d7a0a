"""What collectives move, against bytes counted by hand for four ranks in a ring."""

import pytest
import torch
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel import collectives
from mtcli.core.parallel.groups import Axis, make_groups
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.runtime.health.traffic import Sent, Traffic

RING = Axis(
    "tp", (4, 5, 6, 7), 3, None, FlightRecorder()
)  # its last rank, so the next one is the first
X = torch.zeros(8, 3, dtype=torch.float32)  # 96 bytes, of which a quarter is 24


def sent(op, x=X, **named):
    recorder = FlightRecorder()
    recorder.traffic = Traffic()
    recorder.call(op, RING._replace(recorder=recorder), x, **named)
    return {one.receiver: (one.bytes, one.calls) for one in recorder.traffic.sent}


@pytest.mark.parametrize(
    ("op", "bytes_"),
    # A ring passes on 3 quarters in 3 turns; an all-reduce does so twice; a gather three parts.
    [("all_reduce", 144), ("reduce_scatter", 72), ("all_gather", 288), ("rotate", 96)],
)
def test_what_a_ring_moves_goes_to_the_next_rank(op, bytes_):
    assert sent(op) == {4: (bytes_, 1)}


def test_each_rank_gets_its_part_of_an_all_to_all():
    assert sent("all_to_all", X.view(4, 6)) == {4: (24, 1), 5: (24, 1), 6: (24, 1)}
    pairs = X.view(2, 12)  # between 4 and 5, and between 6 and 7
    assert sent("all_to_all", pairs) == {6: (48, 1)}
    rows = ([1, 0, 2, 5], [2, 2, 2, 2])  # sent and received; its own five rows stay
    assert sent("all_to_all_v", detail=rows) == {4: (12, 1), 5: (0, 1), 6: (24, 1)}


def test_a_broadcast_goes_round_the_ring_to_the_one_before_its_source():
    assert sent("broadcast", detail=1) == {4: (96, 1)}
    assert sent("broadcast", detail=0) == {}  # the next one has it


def test_a_message_is_counted_by_its_sender():
    assert sent("send", detail="F0.0", peer=1) == {5: (96, 1)}
    assert sent("recv", detail="F0.0", peer=1) == {}


def test_what_has_no_tensor_is_not_counted_and_a_number_is():
    assert sent("gather_values", None) == {}
    assert sent("all_reduce", torch.tensor(1.0, dtype=torch.float64)) == {4: (12, 1)}


def test_calls_add_up_by_axis_and_receiver():
    traffic = Traffic()
    for size in (100, 20):
        traffic.add(RING, size)
    assert traffic.sent == [Sent("tp", 4, 120, 2)]


def test_ranks_that_communicate_note_bytes_and_waits():
    run_ranks(2, _check_two_ranks)


def _check_two_ranks(runtime):
    recorder, rank = FlightRecorder(), runtime.rank
    groups = make_groups(ParallelLayout(2, tp=2), rank, torch.device("cpu"), 60.0, recorder)
    traffic = recorder.traffic = Traffic()
    x = torch.ones(4, 2, dtype=torch.float64)  # 64 bytes
    collectives.all_reduce(x, groups.tp)
    collectives.all_gather(x, groups.tp)
    recorder.traffic = None
    collectives.all_reduce(x, groups.tp)
    assert traffic.sent == [Sent("tp", 1 - rank, 128, 2)]
    assert [wait.op for wait in traffic.waits] == ["all_reduce", "all_gather"]
    assert all(wait.axis == "tp" and wait.start < wait.end for wait in traffic.waits)
