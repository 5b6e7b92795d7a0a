"""Runs a function on n ranks: gloo processes forked from one warm process and kept between calls.

The forkserver imports torch and mtcli once (3 s); every rank is a fork of it, and answers the calls
of a file of tests, each with process groups of its own. A rank that raises fails the test with its
own traceback, and the ranks end. Ranks that wait for each other forever are ended: those that
have used no processor for a while, or more of it than they were given, however busy the machine is.
"""

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait

import psutil

DEADLINE = 60.0  # seconds a call may take on all cores, or be idle, before every rank is killed
PRELOADED = ["torch", "torch._dynamo", "mtcli.core.training.loop", "pytest", "hypothesis"]
# Of commands: a rank of `train` would import these for 0.2 s of its 0.6.
PRELOADED += ["mtcli.cli", "rich.table", "tomlkit", "psutil", "mtcli.core.runtime.rendezvous"]
PRELOADED += ["mtcli.core.runtime.console", "mtcli.core.parallel.health.watchdog"]
PRELOADED += ["mtcli.core.profile.measure", "mtcli.core.plan.tables", "mtcli.core.evaluate.run"]
PRELOADED += ["mtcli.core.data.preprocess", "mtcli.core.profile.render"]
PRELOADED += ["matplotlib.figure", "matplotlib.backends.backend_agg"]  # 0.35 s of each picture


def run_ranks(n, function, *arguments, deadline=DEADLINE):
    """[function(runtime, *arguments) of rank 0 .. n - 1], with a process group of n ranks up.

    `function` is a module's own function, so that a fork can import it; arguments and results are
    pickled. Its ranks are those of the calls before it in the same file. Raises AssertionError with
    the traceback of the first rank that failed.
    """
    try:
        return _call(KEPT, n, function, arguments, deadline)
    except BaseException:
        end(KEPT)
        raise


def run_fresh(n, function, *arguments, deadline=DEADLINE):
    """As `run_ranks`, by ranks of its own: for a function that leaves its process changed."""
    ranks = []
    try:
        return _call(ranks, n, function, arguments, deadline)
    finally:
        end(ranks)


def _call(ranks, n, function, arguments, deadline):
    while len(ranks) < n:
        ranks.append(_start())
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        for rank, (_, connection) in enumerate(ranks[:n]):
            work = pickle.dumps((rank, n, f"{folder}/store", function, arguments))
            connection.send_bytes(work)
        return _collect(ranks[:n], deadline)


KEPT = []  # (process, connection) of ranks that wait for calls, of which one of n takes n


def end(ranks=KEPT):
    """Ends ranks, those that are kept unless others are given."""
    for process, connection in ranks:
        process.kill()
        process.join()
        connection.close()
    ranks.clear()


def _start():
    ours, theirs = multiprocessing.Pipe()
    process = warm().Process(target=_serve, args=(theirs,))
    process.daemon = True
    process.start()
    theirs.close()
    return process, ours


@cache
def warm():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(connection: Connection) -> None:
    """Answers calls, each in a process as the one before found it."""
    begin_fork()
    environ, place = dict(os.environ), os.getcwd()
    while True:
        rank, world, store, function, arguments = pickle.loads(connection.recv_bytes())
        try:
            answer = pickle.dumps((True, _run(rank, world, store, function, arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(place)
        connection.send_bytes(answer)  # not send(): it would share tensors' memory


def begin_fork():
    """Makes a fork of the warm process as cheap as it can be."""
    gc.freeze()  # a collection would copy every page of the warm process: 0.2 s
    sys.dont_write_bytecode = False  # as conftest.py: each rank would compile its test's modules


def _run(rank, world, store, function, arguments):
    import torch
    import torch.distributed as dist

    from mtcli.core.runtime.launch import Runtime
    from mtcli.kernels.gemm import set_bfloat16_in_float32

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    set_bfloat16_in_float32(False)
    if world > 1:
        where = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
        dist.init_process_group("gloo", timeout=timedelta(seconds=10 * DEADLINE), **where)
    result = function(Runtime(rank, world, rank, world, torch.device("cpu")), *arguments)
    if world > 1:
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
    return result


def _collect(ranks, deadline):
    answers = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    first, used, moved = None, 0.0, time.monotonic()  # seconds of processor time, when they grew
    while waiting:
        ready = wait(list(waiting), timeout=1.0)
        if not ready:
            now = sum(_processor_seconds(process.pid) for process, _ in ranks)
            first = now if first is None else first
            if now > used + deadline / 60:  # little: a rank may share a core with 60 others
                used, moved = now, time.monotonic()
            if used - first > deadline * os.cpu_count() or time.monotonic() - moved > deadline:
                raise AssertionError(f"ranks {sorted(waiting.values())} did not end in time")
        for connection in ready:
            rank = waiting.pop(connection)
            answers[rank] = _answer(rank, connection)
    return [answers[rank] for rank in range(len(ranks))]


def _processor_seconds(pid):
    """Processor time so far of a process, its threads and its children, such as compilers; 0 once
    it is gone."""
    try:
        rank = psutil.Process(pid)
        spent = [process.cpu_times() for process in (rank, *rank.children(recursive=True))]
    except psutil.Error:
        return 0.0
    # A process's own times do not have those of children that still run.
    return sum(t.user + t.system + t.children_user + t.children_system for t in spent)


def _answer(rank, connection):
    try:
        done, result = pickle.loads(connection.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died without a word") from None
    if not done:
        raise AssertionError(f"rank {rank} failed: {result}")
    return result
