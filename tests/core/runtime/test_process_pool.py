"""Work that processes share: what each gets, and what one failure or death means for all."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial

import pytest
from marks import slow
from ranks import run_ranks

from mtcli.core.config.errors import Exit, MtcliError, wrong
from mtcli.core.runtime.process_pool import ProcessPool, run_parts, shares


@pytest.fixture(autouse=True)
def warm():
    """The fork server has what the other tests need of it, whichever comes first."""
    run_ranks(1, rank_of)


def rank_of(runtime):
    return runtime.rank


def scaled(factor, part, progress):
    for number in part:
        progress(number)
    return [factor * number for number in part]


def fails_where_zero(kind, part, progress):
    if part != [0]:
        time.sleep(1000)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"disk": OSError(28, "No space left on device"), "input": wrong("it is 3 and 4")}[kind]


def test_parts_weigh_much_the_same_and_none_is_empty():
    weights = [7, 1, 1, 1, 5, 5, 0, 8]
    parts = shares(weights, 3)
    assert sorted(sum(parts, [])) == list(range(8))
    assert sorted(sum(weights[i] for i in part) for part in parts) == [9, 9, 10]
    assert shares([3, 4], 5) == [[1], [0]]
    assert shares([0, 0, 0], 2) == [[0, 2], [1]]


def test_results_are_in_order_and_progress_is_of_all():
    seen = []
    results, memory = run_parts(partial(scaled, 10), [[1, 2], [3]], seen.append)
    assert results == [[10, 20], [30]]
    assert sum(seen) == 6
    assert memory.peak > memory.working


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("killed", MtcliError, r"worker process \d+ died with signal 9\n\nhint: is memory short"),
        ("disk", OSError, "No space left on device"),
        ("input", MtcliError, "it is 3 and 4"),
    ],
)
def test_one_failure_is_the_failure_of_all_and_ends_them(kind, error, message):
    with pytest.raises(error, match=message) as raised:
        run_parts(partial(fails_where_zero, kind), [[1], [0], [2]], lambda _: None)
    if kind == "killed":
        assert raised.value.code == Exit.FAILED


WATCHED = """
from mtcli.core.runtime.process_pool import MemoryWatch
bytearray(b"x") * (200 << 20)  # given back at once
watch = MemoryWatch()
before = watch.read()
held = bytearray(b"x") * (60 << 20)
print(before.working, *watch.read())
"""


def test_memory_is_counted_from_the_start_of_a_watch():
    """In a small process: of a large one, systems take back pages that it has not used lately."""
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True)
    before, peak, working = map(int, done.stdout.split())
    assert before < 20 << 20
    assert 50 << 20 < working < 90 << 20
    assert working + (5 << 20) < peak < 200 << 20


def test_a_worker_that_dies_is_said():
    def die(item, tell):
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        ProcessPool(die, 2) as pool,
        pytest.raises(MtcliError, match=r"died with signal 9\n\nhint: .*memory"),
    ):
        list(pool.map([1, 2, 3]))


def test_a_mistake_in_a_worker_is_an_error_and_not_a_traceback(capfd):
    with ProcessPool(lambda item, tell: 1 // item, 2) as pool, pytest.raises(MtcliError) as error:
        list(pool.map([1, 0]))
    assert error.value.code == Exit.FAILED
    assert "ZeroDivisionError in a worker: integer division" in str(error.value)
    assert "Traceback" not in capfd.readouterr().err


def test_results_come_in_order_and_the_first_error_in_order_is_raised():
    def work(item, tell):
        time.sleep(0.002 * (item % 3))
        if item in (7, 8):
            raise MtcliError(wrong(f"item {item}").problems[0])
        return item * item

    with ProcessPool(work, 3) as pool:
        found = pool.map(range(20))
        assert [next(found) for _ in range(7)] == [n * n for n in range(7)]
        with pytest.raises(MtcliError, match="item 7"):
            next(found)


DEADLINE = 30.0  # s, after which a test fails instead of waiting on

POOL = """
    import signal, sys
    from mtcli.core.runtime.process_pool import ProcessPool

    def work(fifo, tell):
        held = open(fifo, "wb", buffering=0)
        held.write(b"x")
        while True:
            signal.pause()

    if __name__ == "__main__":
        with ProcessPool(work, 3) as pool:
            list(pool.map([{fifo!r}] * 3))
"""
PARTS = """
    import signal, sys
    from mtcli.core.runtime import process_pool

    process_pool.PRELOADED = []  # they need no torch's second here, but for their first line

    def work(part, progress):
        held = open(part[0], "wb", buffering=0)
        held.write(b"x")
        while True:
            signal.pause()

    if __name__ == "__main__":
        process_pool.run_parts(work, [[{fifo!r}]] * 3, print)
"""


# No worker outlives the process that started it. Each opens a FIFO for writing and works forever:
# the test reads its end when all are gone.
@slow("a process of its own, 2 s")
@pytest.mark.parametrize("script", [POOL, PARTS], ids=["pool", "parts"])
def test_workers_die_with_a_parent_that_was_killed(script, tmp_path):
    fifo, file = str(tmp_path / "fifo"), tmp_path / "script.py"
    os.mkfifo(fifo)
    file.write_text(textwrap.dedent(script.format(fifo=fifo)))
    parent = subprocess.Popen([sys.executable, str(file)], start_new_session=True)
    try:
        reading = os.open(fifo, os.O_RDONLY)  # returns when a worker has opened it
        assert read(reading, 3) == b"xxx"
        parent.kill()
        parent.wait()
        assert read(reading, 1) == b"", "a worker lives"
    finally:
        kill_group(parent.pid)


def read(file, count):
    """`count` bytes, or fewer where every writer has closed the FIFO."""
    found = b""
    while len(found) < count:
        ready, _, _ = select.select([file], [], [], DEADLINE)
        assert ready, "nothing came, and nobody left"
        if not (byte := os.read(file, 1)):
            break
        found += byte
    return found


def kill_group(group):
    """Kills what a failed test has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
