"""Runs in which a rank stops, sleeps, leaves or calls something else: how they end, and when."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import GPT, documents

from mtcli.core.data.indexed import token_dtype, write_dataset

TIMEOUT = 4.0  # starting up counts as well
CONFIG = """
seed = 7
[model]
{model}
[batch]
seq_len = 8
global_batch_size = 4
[data]
train = ["{data}"]
[train]
steps = 1000000
device = "cpu"
timeout = {timeout}
output = "{output}"
"""
# Loaded by every Python process of a run: after a signal its next step begins otherwise.
FAULTS = """
import os, signal, sys, time

def put(fault):
    def step(self, *arguments):
        fault(self.groups)
        return real(self, *arguments)
    real = sys.modules["mtcli.core.feed"].Feed.step
    sys.modules["mtcli.core.feed"].Feed.step = step

def sleep(groups):
    time.sleep(1000.0)

def call_once_more(groups):
    import torch
    from mtcli.core.parallel.collectives import all_reduce
    all_reduce(torch.ones(3), groups.tp)

def wait_for_nothing(groups):
    import torch
    from mtcli.core.parallel.collectives import receive
    receive(torch.ones(3), groups.tp, 0, "nothing")

if os.environ.get("RANK"):
    signal.signal(signal.SIGQUIT, lambda *_: put(wait_for_nothing))
    signal.signal(signal.SIGUSR1, lambda *_: put(sleep))
    signal.signal(signal.SIGUSR2, lambda *_: put(call_once_more))
    signal.signal(signal.SIGHUP, lambda *_: put(lambda groups: os._exit(0)))
"""
GONE = r"it does not answer \(stopped, dead, or its machine lost\)"
RESUME = "hint: the last good checkpoint is kept: run the same command with --resume"
SLOW = rf"\n\n{RESUME}; raise train.timeout \(4 s\) if the rank was only slow\n"


@pytest.fixture
def started(tmp_path):
    """A function that starts a run and waits for its second step; all is killed in the end."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "sitecustomize.py").write_text(FAULTS)
    write_dataset(tmp_path / "data", documents(), token_dtype(101))
    model = "\n".join(f"{key} = {json.dumps(value)}" for key, value in GPT.items())
    values = {"data": tmp_path / "data", "timeout": TIMEOUT, "output": tmp_path / "run"}
    (tmp_path / "run.toml").write_text(CONFIG.format(model=model, **values))
    folders = [tmp_path / "faults", Path(__file__).parents[2]]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    processes = []

    def start(*words, **environ):
        command = [sys.executable, "-m", "mtcli", "train", str(tmp_path / "run.toml"), *words]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environ = os.environ | paths | environ
        processes.append(subprocess.Popen(command, env=environ, start_new_session=True, **options))
        return processes[-1]

    def wait(process):
        end, metrics = time.monotonic() + 60.0, tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end, "it took too long to start"
            time.sleep(0.05)

    yield start, wait
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.communicate()


def workers(launcher):
    """The worker processes of a launcher by rank, which its environment tells."""
    folder = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    found = {}
    for pid in map(int, folder.read_text().split()):
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if rank := re.search(rb"\0RANK=(\d+)\0", environ):
            found[int(rank[1])] = pid
    return found


def ended(process, seconds):
    """The error of a run that fails within so many seconds: its last lines, said once."""
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < seconds, errors
    assert process.returncode == 1 and "Traceback" not in errors, errors
    assert errors.count("error:") == errors.count("hint:") == 1, errors
    return errors[errors.index("error:") :]


def run(started, number, *settings):
    start, wait = started
    flags = [word for setting in settings for word in ("--set", setting)]
    launcher = start("--nproc", "2", *flags)
    wait(launcher)
    os.kill(workers(launcher)[1], number)
    return launcher


def test_a_rank_that_sleeps_is_named_with_its_place_and_last_number(started):
    error = ended(run(started, signal.SIGUSR1, "parallel.tp=2"), TIMEOUT + 6.0)
    expected = r"error: \w+ number (\d+) on tp \(ranks 0, 1\) has waited for [45] s on rank 0, at "
    expected += (
        r"tp\.py:\d+ in forward \(step \d+\): rank 1 is absent: it is at trainer\.py:\d+ in "
    )
    expected += r"forward_backward, and its last collective on tp was number (\d+)"
    found = re.fullmatch(expected + SLOW, error)
    assert found and int(found[1]) == int(found[2]) + 1, error


def test_a_rank_that_is_stopped_is_named_as_one_that_does_not_answer(started):
    error = ended(run(started, signal.SIGSTOP, "parallel.pp=2"), TIMEOUT + 6.0)
    expected = r"error: \w+ number \d+ on \w+ \(ranks? .* has waited for [45] s on rank 0, at "
    expected += r"\w+\.py:\d+ in \w+ \(step \d+\): rank 1 is absent: " + GONE
    assert re.fullmatch(expected + SLOW, error), error


def test_a_rank_that_leaves_without_a_word_is_named(started):
    error = ended(run(started, signal.SIGHUP), TIMEOUT + 6.0)
    expected = r"error: \w+ number \d+ on \w+ \(ranks 0, 1\) broke on rank 0, at "
    lost = r"(rank 1 has gone|Connection closed by peer \S+|.*: Connection reset by peer)"
    expected += rf"\w+\.py:\d+ in \w+ \(step \d+\): {lost}; "
    expected += rf"rank 1 is absent: {GONE}\n\n{RESUME}\n"
    assert re.fullmatch(expected, error), error


def test_ranks_that_wait_for_each_other_are_told_and_how_to_find_out(started):
    error = ended(run(started, signal.SIGQUIT, "parallel.tp=2"), TIMEOUT + 6.0)
    parts = [
        r"reduce_scatter number \d+ on tp \(ranks 0, 1\)",
        r"recv number 1 on tp \(rank 0 to rank 1\)",
    ]
    both = rf"rank 0 is in {parts[0]}, at tp\.py:\d+ in forward; "
    both += rf"rank 1 is in {parts[1]}, at sitecustomize\.py:\d+ in wait_for_nothing"
    expected = rf"error: ({parts[0]}|{parts[1]}) has waited for [45] s on rank \d, at "
    expected += rf".* \(step \d+\): no rank is absent, they wait for each other: {both}\n\n"
    expected += rf"{RESUME}; train.debug_collectives = true names the first call that differs\n"
    assert re.fullmatch(expected, error), error


def test_the_debug_mode_names_the_first_call_that_differs(started):
    settings = ["parallel.tp=2", "train.debug_collectives=true"]
    error = ended(run(started, signal.SIGUSR2, *settings), 6.0)
    both = [
        r"calls all_reduce of \[3\] float32 \(SUM\) at sitecustomize\.py:\d+ in call_once_more",
        r"calls reduce_scatter of \[8, 16\] float32 at tp\.py:\d+ in forward",
    ]
    expected = [
        rf"error: rank {one} and rank {1 - one} differ at number \d+ on tp \(step \d+\): "
        rf"rank {one} {both[1 - one]}; rank {1 - one} {both[one]}\n\nhint: the ranks .*\n"
        for one in (0, 1)
    ]
    assert any(re.fullmatch(words, error) for words in expected), error


@pytest.fixture
def tasks(started):
    """The two ranks of a run that no launcher watches; rank 0 has the store."""
    start, wait = started
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = str(server.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [start(**place, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    wait(ranks[0])
    return ranks


def test_without_a_launcher_of_ours_one_rank_speaks_and_the_others_leave(tasks):
    os.kill(tasks[1].pid, signal.SIGUSR1)
    assert "rank 1 is absent: it is at trainer.py" in ended(tasks[0], TIMEOUT + 6.0)
    _, errors = tasks[1].communicate(timeout=10)
    assert tasks[1].returncode == 1 and "error" not in errors


def test_a_rank_whose_store_has_stopped_still_ends(tasks):
    os.kill(tasks[0].pid, signal.SIGSTOP)
    error = ended(tasks[1], TIMEOUT + 9.0)
    assert "(ranks 0, 1) has waited for" in error
    assert "; no rank could be asked why: rank 0's store does not answer\n" in error
