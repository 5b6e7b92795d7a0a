"""Runs a function on n ranks: gloo processes forked from one warm process, so a call costs 0.2 s.

The forkserver imports torch and mtcli once (3 s); every rank is a fork of it. A rank that raises
fails the test with its own traceback. Ranks that wait for each other forever are ended: those that
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
from pathlib import Path

import psutil

DEADLINE = 60.0  # seconds a call may take on all cores, or be idle, before every rank is killed
PRELOADED = ["torch", "torch._dynamo", "mtcli.core.training.loop", "pytest", "hypothesis"]
# Of commands: a rank of `train` would import these for 0.2 s of its 0.6.
PRELOADED += ["mtcli.cli", "rich.table", "tomlkit", "psutil", "mtcli.core.runtime.rendezvous"]
PRELOADED += ["mtcli.core.runtime.console", "mtcli.core.runtime.health.watchdog"]
PRELOADED += ["mtcli.core.profile.measure", "mtcli.core.plan.tables", "mtcli.core.evaluate.run"]
PRELOADED += ["mtcli.core.data.preprocess", "mtcli.core.profile.render"]
PRELOADED += ["matplotlib.figure", "matplotlib.backends.backend_agg"]  # 0.35 s of each picture


def run_ranks(n, function, *arguments, deadline=DEADLINE):
    """[function(runtime, *arguments) of rank 0 .. n - 1], with a process group of n ranks up.

    `function` is a module's own function, so that a fork can import it; arguments and results are
    pickled. Raises AssertionError with the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        work = pickle.dumps((function, arguments))
        ranks = [_start(rank, n, Path(folder) / "store", work) for rank in range(n)]
        try:
            return _collect(ranks, deadline)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def _start(rank, world, store, work):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = warm().Process(target=_rank, args=(rank, world, str(store), work, theirs))
    process.daemon = True
    process.start()
    theirs.close()
    return process, ours


@cache
def warm():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _rank(rank: int, world: int, store: str, work: bytes, connection: Connection) -> None:
    begin_fork()
    try:
        answer = pickle.dumps((True, _run(rank, world, store, work)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)  # not send(): it would share tensors' memory


def begin_fork():
    """Makes a fork of the warm process as cheap as it can be."""
    gc.freeze()  # a collection would copy every page of the warm process: 0.2 s
    sys.dont_write_bytecode = False  # as conftest.py: each rank would compile its test's modules


def _run(rank, world, store, work):
    import torch
    import torch.distributed as dist

    from mtcli.core.runtime.launch import Runtime

    torch.set_num_threads(1)
    function, arguments = pickle.loads(work)
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
    used, moved = 0.0, time.monotonic()  # seconds of processor time, and when there were more
    while waiting:
        ready = wait(list(waiting), timeout=1.0)
        if not ready:
            now = sum(_processor_seconds(process.pid) for process, _ in ranks)
            if now > used + deadline / 60:  # little: a rank may share a core with 60 others
                used, moved = now, time.monotonic()
            if used > deadline * os.cpu_count() or time.monotonic() - moved > deadline:
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
