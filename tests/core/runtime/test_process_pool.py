"""Work that processes share: what each gets, and what happens to all when one fails."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from ranks import run_ranks

from mtcli.core.config.errors import Exit, MtcliError, wrong
from mtcli.core.runtime.process_pool import run_parts, shares


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
        ("killed", MtcliError, "a worker process died with exit code -9"),
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
