"""No worker outlives the process that started it, however that one ends.

Each worker opens a FIFO for writing and works forever: the test reads its end when all are gone.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

DEADLINE = 30.0  # s, after which a test fails instead of waiting on

POOL = """
    import signal, sys
    from mtcli.core.runtime.data_pool import Pool

    def work(fifo, tell):
        held = open(fifo, "wb", buffering=0)
        held.write(b"x")
        while True:
            signal.pause()

    if __name__ == "__main__":
        with Pool(work, 3) as pool:
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


@pytest.mark.parametrize("script", [POOL, PARTS], ids=["data pool", "checkpoint workers"])
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
