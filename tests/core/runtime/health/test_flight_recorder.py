import re
import threading
import time

import pytest
import torch

from mtcli.core.parallel.groups import Axis
from mtcli.core.runtime.health.flight_recorder import FlightRecorder, location
from mtcli.core.runtime.health.traffic import Traffic


def axis(recorder, name="tp", ranks=(2, 3), rank=0):
    return Axis(name, ranks, rank, None, recorder)


def test_collectives_are_numbered_by_axis_and_messages_by_pair():
    recorder = FlightRecorder()
    tp, pp = axis(recorder), axis(recorder, "pp_forward", (0, 4, 8), rank=1)
    made = [recorder.call("all_reduce", tp), recorder.call("all_gather", tp)]
    made += [recorder.call("send", pp, peer=2), recorder.call("recv", pp, peer=0)]
    made += [recorder.call("send", pp, peer=2)]
    assert [(call.channel, call.number) for call in made] == [
        ("tp", 1), ("tp", 2), ("pp_forward 4>8", 1), ("pp_forward 0>4", 1), ("pp_forward 4>8", 2),
    ]  # fmt: skip
    assert made[1].peers() == (2, 3) and made[3].peers() == (4, 0)


def test_a_rank_waits_only_between_the_start_and_the_end_of_a_call():
    recorder = FlightRecorder()
    call = recorder.call("all_reduce", axis(recorder))
    assert recorder.oldest() is None, "it is numbered and not yet made"
    with call:
        assert recorder.oldest() is call
    assert recorder.oldest() is None


def test_the_first_collective_that_breaks_is_kept_with_its_location():
    recorder = FlightRecorder()
    for op in ("all_reduce", "all_gather"):
        with pytest.raises(RuntimeError), recorder.call(op, axis(recorder)):
            raise RuntimeError(f"{op} lost")
    with pytest.raises(KeyError), recorder.call("all_reduce", axis(recorder)):
        raise KeyError("of ours")
    assert recorder.oldest() is None
    assert recorder.broken.call.op == "all_reduce" and recorder.broken.error == "all_reduce lost"
    assert re.fullmatch(
        r"test_flight_recorder\.py:\d+ in test_the_first\w+", recorder.broken.location
    )


def test_of_several_threads_the_one_that_has_waited_longest_counts():
    recorder, done, inside = FlightRecorder(), threading.Event(), threading.Event()
    first, second = (recorder.call(op, axis(recorder)) for op in ("all_gather", "all_reduce"))

    def wait():
        with first:
            inside.set()
            done.wait(120.0)

    thread = threading.Thread(target=wait)
    thread.start()
    inside.wait(10.0)
    with second:
        assert recorder.oldest() is first
        assert first.since < second.since
        done.set()
        thread.join()
        assert recorder.oldest() is second


def test_a_device_that_waits_by_itself_is_asked_whether_it_has_got_past():
    reached = {"all_gather": False, "all_reduce": False}
    clock = iter([10.0, 10.25, 20.0, 21.5])

    class Marked:
        def __init__(self):
            self.at = next(clock)

        def reached(self):
            return self.at < 20.0 and reached["all_gather"] or reached["all_reduce"]

        def seconds_since(self, earlier):
            return self.at - earlier.at

    recorder = FlightRecorder(mark=Marked)
    calls = [recorder.call(op, axis(recorder)) for op in reached]
    for call in calls:
        with call:
            pass
    assert recorder.oldest() is calls[0] and recorder.take_waited() == 0.0
    reached["all_gather"] = True
    assert recorder.oldest() is calls[1] and recorder.take_waited() == 0.25
    reached["all_reduce"] = True
    assert recorder.take_waited() == 1.5
    assert recorder.oldest() is None and not recorder.queued and recorder.take_waited() == 0.0


def test_a_check_sees_each_call_while_its_rank_waits():
    seen = []
    recorder = FlightRecorder(
        check=lambda call, x, detail: seen.append((call, x, detail, recorder.oldest()))
    )
    call = recorder.call("all_reduce", axis(recorder), "x", "sum")
    assert seen == [(call, "x", "sum", call)] and recorder.oldest() is None


def test_a_place_is_the_innermost_frame_of_the_package_or_at_all():
    inside, done = threading.Event(), threading.Event()

    def check(*_):
        inside.set()
        done.wait(120.0)

    work = [lambda: FlightRecorder(check=check).call("all_reduce", axis(FlightRecorder())), check]
    expected = [r"flight_recorder\.py:\d+ in call", r"threading\.py:\d+ in wait"]
    for target, words in zip(work, expected, strict=True):
        inside.clear(), done.clear()
        thread = threading.Thread(target=target)
        thread.start()
        assert inside.wait(60.0)
        end = time.monotonic() + 60.0
        while not re.fullmatch(words, location(thread.ident)):  # it is on its way there
            assert time.monotonic() < end, location(thread.ident)
            time.sleep(0.01)
        done.set()
        thread.join()
    assert location(0) == "the end of its thread"


def test_a_thread_beside_training_is_seen_and_not_compared():
    compared, marked = [], []
    recorder = FlightRecorder(lambda *call: compared.append(call), lambda: marked.append(1))
    beside = recorder.beside()
    with pytest.raises(RuntimeError), beside.call("gather_values", axis(beside, "saving")) as call:
        assert call is None and recorder.oldest().channel == "saving"
        raise RuntimeError("lost")
    assert recorder.counts == {"saving": 1} and recorder.broken.error == "lost"
    with beside.call("gather_values", axis(beside, "saving")):
        pass
    assert (compared, marked) == ([], []) and recorder.counts == {"saving": 2}
    with recorder.call("all_reduce", axis(recorder)):
        pass
    assert len(compared) == 1 and marked


def test_a_graphs_calls_leave_no_mark_and_their_bytes_count_at_each_replay():
    marks, checked, traffic = [], [], Traffic()
    recorder = FlightRecorder(
        check=lambda call, *_: checked.append(call.op), mark=lambda: marks.append("")
    )
    tp, x = axis(recorder), torch.zeros(4)
    with recorder.in_graph() as note_calls, recorder.call("all_gather", tp, x):
        pass
    assert not marks and not checked and not recorder.queued
    recorder.traffic = traffic
    for _ in range(3):
        note_calls()
    assert [(sent.axis, sent.bytes, sent.calls) for sent in traffic.sent] == [("tp", 3 * 16, 3)]
    with recorder.call("all_gather", tp, x):
        pass
    assert marks and recorder.queued and checked == ["all_gather"]


def test_a_recording_that_fails_leaves_the_recorder_as_it_was():
    recorder = FlightRecorder(mark=object)
    with pytest.raises(RuntimeError), recorder.in_graph():
        raise RuntimeError("capture")
    assert recorder.mark is object and recorder.traffic is None
