"""The Chrome trace: what Perfetto needs, and ops laid over the profiler's own time."""

import json

import pytest

from mtcli.core.profile.trace import STEP, op_events, write_trace

TRACE = {
    "schemaVersion": 1,
    "traceEvents": [{"ph": "X", "name": STEP, "ts": 5e6, "dur": 12e6, "pid": 1, "tid": 1}],
}


def test_ops_lie_on_the_profilers_time(records):
    ops = {(e["tid"], e["name"]): e for e in op_events(TRACE, records) if e["ph"] == "X"}
    assert ops[1, "B0.1"]["ts"] == pytest.approx(5e6 + 2.75e6)
    assert ops[1, "B0.1"]["dur"] == pytest.approx(2e6)
    assert ops[0, "optimizer"]["dur"] == pytest.approx(1e6)


def test_the_file_holds_the_profilers_events_and_a_named_track_per_rank(records, tmp_path):
    write_trace(str(tmp_path / "trace.json"), TRACE, records)
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data["traceEvents"][0]["name"] == STEP
    names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["pipeline rank 0", "pipeline rank 1"]
    assert all({"name", "ph", "pid", "tid"} <= set(event) for event in data["traceEvents"])


def test_what_gloo_carries_on_with_is_no_slice_of_the_thread_that_began_it(records, tmp_path):
    where = {"pid": 1, "tid": 1}
    began = {"ph": "X", "name": "c10d::recv_", "ts": 6e6, "dur": 40.0, **where}
    carried = {"ph": "X", "name": "gloo:recv", "ts": 6e6 + 30, "dur": 500.0, **where}
    trace = {"traceEvents": [*TRACE["traceEvents"], began, carried]}
    write_trace(str(tmp_path / "trace.json"), trace, records)
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in found if e["ph"] == "X" and e["tid"] == 1][:2] == [
        STEP,
        began["name"],
    ]
    begin, end = (e for e in found if e["name"] == "gloo:recv")
    assert (begin["ph"], begin["ts"], end["ph"], end["ts"]) == ("b", 6e6 + 30, "e", 6e6 + 530)
    assert begin["id"] == end["id"] and begin["cat"] == end["cat"] and "dur" not in begin
