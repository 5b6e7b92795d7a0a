"""Ranks that wait for one that does something else, until the watch of that one frees them."""

import os
import re
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel import collectives
from mtcli.core.parallel.groups import Axis, make_groups
from mtcli.core.runtime.health.watchdog import Watchdog, values_of
from mtcli.core.sync.all_reduce import Bucket

TIMEOUT = 0.8
LONG = 40.0  # s: more than anything here takes, on a busy machine too
LATE = r"raise train.timeout \(0.8 s\) if the rank was only slow"


class Ended(threading.Event):
    """What a watch does at the end, in place of leaving: it keeps the error and frees its rank."""

    error, silent = None, []

    def __init__(self, mark=None):
        super().__init__()
        self.mark = mark  # a file, for ranks that no watch would wake

    def __call__(self, error, silent, lost):
        if not self.is_set():
            self.error, self.silent = error and str(error), silent
        self.set()
        if self.mark:
            self.mark.touch()


def watched(runtime, path, work, missing, answers=True):
    """(error, silent) of a rank's watch while all do `work`, the `missing` one long too late."""
    mark = Path(f"{path}-ended")
    ended, groups = Ended(mark), make_groups(LAYOUTS[work](runtime.world), runtime.rank, "cpu")
    store = dist.FileStore(path, runtime.world)
    watch = Watchdog(groups.tp.recorder, store, runtime.rank, runtime.world, TIMEOUT, ended)
    groups.tp.recorder.step = 7
    if runtime.rank != missing or answers:
        watch.start(1000 + runtime.rank)
        at_work = runtime.rank != missing or ended.wait(LONG)
    else:
        store.set(f"pid/{missing}", "1234")
        at_work = exists(mark)
    assert at_work, "nobody missed this rank"
    globals()[work](groups)
    return ended.error, ended.silent, ended.wait(LONG * answers)


def exists(file):
    """Whether a file comes to be, which may take long on a busy machine."""
    end = time.monotonic() + LONG
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return file.exists()


def tensor(groups):
    collectives.all_reduce(torch.ones(4), groups.tp)


def backward(groups):
    x = torch.ones(4, requires_grad=True)
    collectives.copy_in(x, groups.tp).sum().backward()


def bucket(groups):
    axis = groups.axes["data"]
    reduced = Bucket({"w": (4,)}, groups.over(()), axis, torch.zeros(1))
    reduced.start()
    reduced.finish()


def message(groups):
    axis = groups.axes["pp_forward"]
    if groups.pp_rank == 0:
        collectives.start_send(torch.ones(4), axis, 1, "F0.0").wait()
    else:
        collectives.receive(torch.ones(4), axis, 0, "F0.0")


def ring(groups):
    collectives.RingShift(torch.ones(4), groups.cp).wait()


LAYOUTS = {
    "tensor": lambda n: ParallelLayout(n, tp=2),
    "backward": lambda n: ParallelLayout(n, tp=2),
    "bucket": lambda n: ParallelLayout(n),
    "message": lambda n: ParallelLayout(n, pp=2),
    "ring": lambda n: ParallelLayout(n, cp=2),
}


@pytest.mark.parametrize(
    ("work", "missing", "waits"),
    [
        ("tensor", 3, r"all_reduce number 1 on tp \(ranks 2, 3\) .* on rank 2, at {} in tensor"),
        ("backward", 1, r"all_reduce number 1 on tp \(ranks 0, 1\) .* rank 0, at {} in backward"),
        (
            "bucket",
            1,
            r"all_reduce number 1 on data \(ranks 0, 1\) .* at all_reduce.py:\d+ in finish",
        ),
        ("message", 0, r"recv number 1 on pp_forward \(rank 0 to rank 1\) .* at {} in message"),
        ("ring", 1, r"rotate number 1 on cp \(ranks 0, 1\) .* rank 0, at {} in ring"),
    ],
)
def test_a_rank_that_another_waits_for_is_named(tmp_path, work, missing, waits):
    world = 4 if work == "tensor" else 2
    answers = run_ranks(world, watched, str(tmp_path / "store"), work, missing)
    (error,) = [error for error, *_ in answers if error]
    assert all(silent == [] and over for _, silent, over in answers)
    here = waits.format(r"test_watchdog\.py:\d+").replace(".* ", r"has waited for \d+ s .*", 1)
    expected = rf"error: {here} \(step 7\): rank {missing} is absent: it is at threading\.py:\d+ "
    assert re.fullmatch(rf"{expected}in wait\n\nhint: {LATE}", error), error


def test_a_rank_that_does_not_answer_is_named_and_its_process_told(tmp_path):
    first, second = run_ranks(2, watched, str(tmp_path / "store"), "tensor", 1, False)
    expected = r"error: all_reduce number 1 on tp \(ranks 0, 1\) .* on rank 0, .* in tensor .*: "
    expected += r"rank 1 is absent: it does not answer \(stopped, dead, or its machine lost\)\n\n.*"
    assert re.fullmatch(expected, first[0]), first
    assert first[1] == [1234] and second[0] is None


def tcp_store(rank):
    """A store that rank 0 holds, as a run's."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = [host and host.port]
    dist.broadcast_object_list(port, 0)
    return host or dist.TCPStore("127.0.0.1", port[0])


def succeeded(runtime, waits):
    """(error, silent) of rank 0's watch, where rank 1 is to report and stops."""
    ended, groups = Ended(), make_groups(ParallelLayout(2, tp=2), runtime.rank, "cpu")
    timeout, store = (LONG, TIMEOUT)[runtime.rank], tcp_store(runtime.rank)
    watch = Watchdog(groups.tp.recorder, store, runtime.rank, 2, timeout, ended)
    if runtime.rank == 1:
        watch._report = lambda *stall: watch.stopped.set()
    watch.start(1000 + runtime.rank)
    with groups.tp.recorder.call("all_reduce", groups.tp) if waits[runtime.rank] else nullcontext():
        assert runtime.rank == 1 or ended.wait(LONG)
        dist.barrier()
    return ended.error, ended.silent


@pytest.mark.parametrize("waits", [(True, True), (False, True)])
def test_a_rank_that_is_to_report_and_stops_is_reported_by_another(waits):
    first, second = run_ranks(2, succeeded, waits)
    expected = r"error: all_reduce number 1 on tp \(ranks 0, 1\) has waited for \d+ s on rank {}, "
    expected += r"at \w+\.py:\d+ in \w+: rank {} is absent: {}\n\nhint: .*"
    stopped = r"it does not answer \(stopped, dead, or its machine lost\)"
    who = (0, 1, stopped) if waits[0] else (1, 0, r"it is at threading\.py:\d+ in wait")
    assert re.fullmatch(expected.format(*who), first[0]), first
    assert first[1] == [1001] and second == (None, [])


def broken(runtime, path):
    """What rank 0's watch says where a collective of it breaks, and rank 1 is busy or gone."""
    ended = Ended()
    groups = make_groups(ParallelLayout(3, tp=3), runtime.rank, "cpu")
    watch = Watchdog(groups.tp.recorder, dist.FileStore(path, 3), runtime.rank, 3, LONG, ended)
    if runtime.rank < 2:
        watch.start(1)
    start = time.monotonic()
    if runtime.rank == 0:
        with pytest.raises(RuntimeError), groups.tp.recorder.call("all_reduce", groups.tp):
            raise RuntimeError("Connection closed by peer. And so on")
        watch.explain()
    elif runtime.rank == 1:
        ended.wait(LONG)
    return ended.error, ended.is_set(), time.monotonic() - start


def test_a_collective_that_breaks_is_explained_before_its_rank_goes_on(tmp_path):
    first, second, _ = run_ranks(3, broken, str(tmp_path / "store"))
    assert re.fullmatch(
        r"error: all_reduce number 1 on tp \(ranks 0, 1, 2\) broke on rank 0, "
        r"at test_watchdog\.py:\d+ in broken: Connection closed by peer; "
        r"rank 2 is absent: it does not answer \(stopped, dead, or its machine lost\)",
        first[0],
    ), first
    assert first[2] < LONG / 2, "two seconds, however long train.timeout is"
    assert second[0] is None and second[1], "its peers leave without a word"


def given_up(runtime, path, both):
    """How rank 0's watch ends it where rank 1 fails, or both do: (error, lost), and seconds."""
    ended, seen = Ended(), []
    groups = make_groups(ParallelLayout(2, tp=2), runtime.rank, "cpu")

    def end(error, silent, lost):
        seen.extend([error, lost])
        ended(error, silent, lost)

    watch = Watchdog(groups.tp.recorder, dist.FileStore(path, 2), runtime.rank, 2, LONG, end)
    watch.start(1)
    start = time.monotonic()
    while both and runtime.rank == 0 and not watch.answered:
        time.sleep(0.01)
    if both or runtime.rank == 1:
        watch.give_up()
    else:
        with groups.tp.recorder.call("all_reduce", groups.tp):  # where it waits for the other
            ended.wait(LONG)
    return seen, time.monotonic() - start


def test_a_rank_that_fails_by_itself_takes_its_peers_along_without_a_word(tmp_path):
    first, second = run_ranks(2, given_up, str(tmp_path / "store"), False)
    assert first[0] == [None, True] and first[1] < LONG / 2, "whatever train.timeout is"
    assert second[0] == []


def test_a_rank_that_fails_too_speaks_for_itself(tmp_path):
    for seen, _ in run_ranks(2, given_up, str(tmp_path / "store"), True):
        assert seen == []


def quick(runtime, path):
    """Whether a watch ended ranks that never wait long, though they work for long."""
    ended = Ended()
    groups = make_groups(ParallelLayout(2, tp=2), runtime.rank, "cpu")
    store = dist.FileStore(path, 2)
    timeout = 2.0 * TIMEOUT  # a busy machine may keep a rank from its turn for a while
    watch = Watchdog(groups.tp.recorder, store, runtime.rank, 2, timeout, ended)
    watch.start(os.getpid())
    end = time.monotonic() + 1.25 * timeout
    while collectives.gather_values(time.monotonic() < end, groups.tp)[0]:
        tensor(groups)
    watch.leave()
    still = [thread for thread in watch.threads if thread.is_alive()]
    return ended.is_set(), len(still), store.check([f"answer/{1 - runtime.rank}"])


def test_ranks_that_meet_in_time_are_left_alone_and_say_when_they_end(tmp_path):
    assert run_ranks(2, quick, str(tmp_path / "store"))[0] == (False, 0, True)


class Stopped:
    """A store whose host has stopped: whoever asks is never answered."""

    def __init__(self):
        self.free = threading.Event()

    def set_timeout(self, limit):
        pass

    def set(self, key, value):
        pass

    def check(self, keys):
        self.free.wait(LONG)
        return False

    compare_set = check


def test_a_rank_whose_store_does_not_answer_speaks_for_itself():
    ended, store = Ended(), Stopped()
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    watch = Watchdog(groups.tp.recorder, store, 0, 2, 0.4, ended)
    watch.grace = 0.2
    watch.start(1)
    with groups.tp.recorder.call("all_reduce", groups.tp):
        assert ended.wait(LONG)
    store.free.set()
    watch.stop()
    assert re.fullmatch(
        r"error: all_reduce number 1 on tp \(ranks 0\) has waited for \d+ s on rank 0, at "
        r"threading\.py:\d+ in wait; no rank could be asked why: rank 0's store does not answer\n\n"
        r"hint: look at rank 0's machine",
        ended.error,
    )
    assert ended.silent == []


def test_a_collective_that_breaks_with_the_store_names_the_host_of_both():
    ended, recorder = Ended(), make_groups(ParallelLayout(1), 0, torch.device("cpu")).tp.recorder
    axis = Axis("data", (0, 1), 1, None, recorder)
    watch = Watchdog(recorder, Gone(), 1, 2, 30.0, ended)
    watch.start(1)
    with pytest.raises(RuntimeError), recorder.call("all_reduce", axis):
        raise RuntimeError("Connection reset by peer")
    watch.explain()
    assert re.fullmatch(
        r"error: all_reduce number 1 on data \(ranks 0, 1\) broke on rank 1, "
        r"at test_watchdog\.py:\d+ in test_\w+: Connection reset by peer; rank 0 is absent: "
        r"it does not answer \(stopped, dead, or its machine lost\)",
        ended.error,
    )


def test_a_rank_that_has_lost_the_store_ends_where_it_is():
    ended, recorder = Ended(), make_groups(ParallelLayout(1), 0, torch.device("cpu")).tp.recorder
    watch = Watchdog(recorder, Gone(), 1, 2, 30.0, ended)
    watch.grace = 0.2
    watch.start(1)
    assert ended.wait(LONG)
    assert re.fullmatch(
        r"error: rank 1, at threading\.py:\d+ in wait, has lost the run's store: its launcher, "
        r"or rank 0, has ended",
        ended.error,
    )


class Gone(Stopped):
    """A store whose host is dead."""

    def check(self, keys):
        raise RuntimeError("Broken pipe")

    def compare_set(self, key, expected, value):
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("missing", [(), (3,), (0, 1, 2), (4, 8), tuple(range(9))])
def test_the_answers_that_a_store_has_are_found_whichever_are_missing(missing):
    store, there = dist.HashStore(), sorted({*range(9)} - {*missing})
    for rank in there:
        store.set(f"answer/{rank}", str(rank))
    assert values_of(store, [f"answer/{rank}" for rank in range(9)]) == [b"%d" % n for n in there]
