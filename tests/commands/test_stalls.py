"""Runs in which a rank stops, sleeps, leaves or calls something else: how they end, and when."""

import os
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from shutil import rmtree

import pytest
from command_line import stand_ins, start, workers_of
from marks import slow
from tiny import write_run

# s: a stall while ranks start counts as well, so that a busy machine needs more of them
TIMEOUTS = 3, 12, 48
AT_ONCE = 30.0  # s: a busy machine takes its time, and a rank that is not ended goes on for longer
GONE = r"it does not answer \(stopped, dead, or its machine lost\)"
AGAIN = "hint: no checkpoint is saved yet: run the same command with --start-over"
SLOW = rf"\n\n{AGAIN}; raise train.timeout \(\d+ s\) if the rank was only slow\n"


STOPPED = r"error: \w+ number \d+ on \w+ \(ranks? .* has waited for \d+ s on rank 0, at "
STOPPED += r"\w+\.py:\d+ in \w+ \(step \d+\): rank 1 is absent: " + GONE + SLOW


@pytest.fixture
def config(tmp_path):
    """The file of a run that goes on until something ends it."""
    return write_run(tmp_path, train={"steps": 1_000_000})


def at_the_third(rank, act, on, mark):
    """On rank `on`, calls act(groups) where its third step would read its batch."""
    if rank != on:
        return
    from mtcli.core.training.loader import MicroBatchLoader

    real, count = MicroBatchLoader.step, 0

    def step(self, *arguments):
        nonlocal count
        count += 1
        if count >= 3:
            mark.touch()
            act(self.groups)
        return real(self, *arguments)

    MicroBatchLoader.step = step


def sleep(groups):
    time.sleep(1000.0)


def stop(groups):
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(groups):
    os._exit(0)


def call_once_more(groups):
    import torch

    from mtcli.core.parallel.collectives import all_reduce

    all_reduce(torch.ones(3), groups.tp)


def wait_for_nothing(groups):
    import torch

    from mtcli.core.parallel.collectives import receive

    receive(torch.ones(3), groups.tp, 0, "nothing")


def ended(config, act, *settings, on=1):
    """What became of two ranks, of which one does something at its third step, in time."""
    mark = config.with_name("mark")
    fault = partial(at_the_third, act=act, on=on, mark=mark)
    for timeout in TIMEOUTS:
        flags = flags_of(config, f"train.timeout={timeout}", *settings)
        run = start("train", config, *flags, "--nproc", 2, fault=fault)
        done = run.ended([1 - on] if act is stop else None)
        if mark.exists():  # else they were too slow to get there
            break
    assert time.time() - mark.stat().st_mtime < AT_ONCE + timeout, done.errors
    return done


def flags_of(config, *settings):
    """The flags of a run that begins anew."""
    rmtree(config.with_name("run"), ignore_errors=True)
    return [word for setting in settings for word in ("--set", setting)]


def failed(config, act, *settings, on=1):
    """The error of such ranks, which one of them says, once."""
    done = ended(config, act, *settings, on=on)
    return said(done.codes[1 - on], done.stderr)


def said(code, errors):
    """The last lines of a run that failed, which say why, once."""
    assert code == 1 and "Traceback" not in errors, errors
    assert errors.count("error:") == errors.count("hint:") == 1, errors
    return errors[errors.index("error:") :]


def test_a_rank_that_sleeps_is_named_with_its_place_and_last_number(config):
    error = failed(config, sleep, "parallel.tp=2")
    expected = r"error: \w+ number (\d+) on tp \(ranks 0, 1\) has waited for \d+ s on rank 0, at "
    expected += r"vocab_parallel\.py:\d+ in forward \(step \d+\): rank 1 is absent: "
    expected += (
        r"it is at step\.py:\d+ in forward_backward, and its last collective on tp was number (\d+)"
    )
    found = re.fullmatch(expected + SLOW, error)
    assert found and int(found[1]) == int(found[2]) + 1, error


@slow("a stall of 3 s")
def test_a_rank_that_leaves_without_a_word_is_named(config):
    error = failed(config, leave)
    expected = r"error: \w+ number \d+ on \w+ \(ranks 0, 1\) broke on rank 0, at "
    lost = r"(rank 1 has gone|Connection closed by peer \S+|.*: Connection reset by peer)"
    expected += rf"\w+\.py:\d+ in \w+ \(step \d+\): {lost}; "
    expected += rf"rank 1 is absent: {GONE}\n\n{AGAIN}\n"
    assert re.fullmatch(expected, error), error


@slow("a stall of 3 s")
def test_ranks_that_wait_for_each_other_are_told_and_how_to_find_out(config):
    error = failed(config, wait_for_nothing, "parallel.tp=2")
    parts = [
        r"reduce_scatter number \d+ on tp \(ranks 0, 1\)",
        r"recv number 1 on tp \(rank 0 to rank 1\)",
    ]
    both = rf"rank 0 is in {parts[0]}, at vocab_parallel\.py:\d+ in forward; "
    both += rf"rank 1 is in {parts[1]}, at test_stalls\.py:\d+ in wait_for_nothing"
    expected = rf"error: ({parts[0]}|{parts[1]}) has waited for \d+ s on rank \d, at "
    expected += rf".* \(step \d+\): no rank is absent, they wait for each other: {both}\n\n"
    expected += rf"{AGAIN}; train.debug_collectives = true names the first call that differs\n"
    assert re.fullmatch(expected, error), error


def test_the_debug_mode_names_the_first_call_that_differs(config):
    settings = ["parallel.tp=2", "train.debug_collectives=true"]
    done = ended(config, call_once_more, *settings)
    calls = [
        r"calls reduce_scatter of \[8, 16\] float32 at vocab_parallel\.py:\d+ in forward",
        r"calls all_reduce of \[3\] float32 \(SUM\) at test_stalls\.py:\d+ in call_once_more",
    ]
    for one, other in ((0, 1), (1, 0)):
        expected = rf"error: rank {one} and rank {other} differ at number \d+ on tp \(step \d+\): "
        expected += rf"rank {one} {calls[one]}; rank {other} {calls[other]}\n\nhint: the ranks .*\n"
        assert re.fullmatch(expected, said(done.codes[one], done.errors[one]))


@slow("a stall of 3 s")
def test_a_rank_whose_store_has_stopped_still_ends(config):
    error = failed(config, stop, on=0)
    assert "(ranks 0, 1) has waited for" in error
    assert "; no rank could be asked why: rank 0's store does not answer\n" in error


def stopped(config, timeout):
    """(exit code, errors, rank 1's process id) of a launcher whose rank 1 is stopped in a step;
    None where the run ends before that."""
    command = [stand_ins() / "mtcli", "train", config, "--nproc", "2"]
    command += flags_of(config, f"train.timeout={timeout}", "parallel.pp=2")
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, **options)
    try:
        if not trains(launcher, config.parent / "run" / "metrics.jsonl"):
            return None
        rank_1 = workers_of(launcher.pid)[1]
        os.kill(rank_1, signal.SIGSTOP)
        _, errors = launcher.communicate(timeout=AT_ONCE + TIMEOUTS[-1])
        return launcher.returncode, errors, rank_1
    finally:
        launcher.kill()
        launcher.communicate()


def trains(launcher, metrics):
    """Whether a run comes to its third step, and does not end before."""
    while launcher.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 2:
            return True
        time.sleep(0.05)
    return False


@slow("a launcher and a stall of 3 s")
def test_our_launcher_says_what_a_rank_found_and_ends_the_one_that_is_stopped(config):
    for timeout in TIMEOUTS:
        done = stopped(config, timeout)
        if done and "no rank is absent" not in done[1]:  # they were not slow before
            break
    code, errors, rank_1 = done
    assert re.fullmatch(STOPPED, said(code, errors)), errors
    end = time.monotonic() + AT_ONCE
    while Path(f"/proc/{rank_1}").exists():  # it is killed with what stands in for it
        assert time.monotonic() < end, "the rank that is stopped is still there"
        time.sleep(0.01)
