"""Work shared by processes: parts of equal weight, one error for all, and how much memory it took.

Workers are forked from a server that has imported torch and computed nothing, since a fork of a
process that has used OpenMP may hang. They need no process group: a part is files or tensors that
no other part touches.
"""

import contextlib
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from mtcli.core.config.errors import failed
from mtcli.core.runtime.lifeline import end_with_parent

PRELOADED = ["mtcli.core.convert.shard"]
REPORT_SECONDS = 0.1  # between two reports of a worker's progress

Progress = Callable[[int], None]  # told bytes that were worked through
Item = TypeVar("Item")
WorkerFunction = Callable[
    [list[Item], Progress], Any
]  # of a part; a module's own function, or partial of one


class ProcessMemory(NamedTuple):
    """Resident bytes of a process: the most there were, and how many more than at the start."""

    peak: int
    working: int

    def or_more(self, other: "ProcessMemory") -> "ProcessMemory":
        """The larger of each."""
        return ProcessMemory(max(self.peak, other.peak), max(self.working, other.working))


class MemoryWatch:
    """The memory of this process from here on."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
        self.start = _resident("VmRSS")

    def read(self) -> ProcessMemory:
        """What it came to."""
        peak = _resident("VmHWM")
        return ProcessMemory(peak, max(0, peak - self.start))


def shares(weights: Sequence[int], count: int) -> list[list[int]]:
    """At most `count` lists of indices whose weights sum to much the same; none is empty."""
    parts: list[list[int]] = [[] for _ in range(max(1, min(count, len(weights))))]
    loads = [0] * len(parts)
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += max(1, weights[index])
    return [sorted(part) for part in parts]


def run_parts(
    work: WorkerFunction[Item], parts: list[list[Item]], progress: Progress
) -> tuple[list[Any], ProcessMemory]:
    """[work(part) of each part], a process for each unless there is one, and the most memory that
    a worker took.

    The first that fails ends all of them: its exception is raised, or MtcliError (exit 1) where it
    was killed.
    """
    if len(parts) < 2:
        return [work(part, progress) for part in parts], ProcessMemory(0, 0)
    workers = [_start(work, part) for part in parts]
    try:
        return _collect(workers, progress)
    finally:
        for process, connection in workers:
            process.kill()
            process.join()
            connection.close()


def _resident(kind: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def _start(work: WorkerFunction[Item], part: list[Item]) -> tuple[ForkServerProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, work, part), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _collect(
    workers: list[tuple[ForkServerProcess, Connection]], progress: Progress
) -> tuple[list[Any], ProcessMemory]:
    results: dict[int, Any] = {}
    memory = ProcessMemory(0, 0)
    waiting = {connection: index for index, (_, connection) in enumerate(workers)}
    while waiting:
        for connection in wait(list(waiting)):
            assert isinstance(connection, Connection)
            index = waiting[connection]
            kind, value = _receive(connection, workers[index][0])
            if kind == "progress":
                progress(value)
            elif kind == "failed":
                raise value
            else:
                results[index], taken = value
                memory = memory.or_more(taken)
                del waiting[connection]
    return [results[index] for index in range(len(workers))], memory


def _receive(connection: Connection, process: ForkServerProcess) -> tuple[str, Any]:
    try:
        return connection.recv()  # pickled by our own process, never read from a file
    except EOFError:
        process.join()
        hint = "is memory short? fewer --nproc take less of it"
        raise failed(f"a worker process died with exit code {process.exitcode}", hint) from None


def _work(connection: Connection, work: WorkerFunction[Item], part: list[Item]) -> None:
    import torch

    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us
    torch.set_num_threads(1)
    watch, report = MemoryWatch(), _Report(connection)
    try:
        result = work(part, report.add)
        report.send()
        connection.send(("done", (result, watch.read())))
    except Exception as error:  # any: the parent raises it
        error.add_note(traceback.format_exc())
        connection.send(("failed", error))


class _Report:
    """Progress, sent now and then."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.bytes, self.sent = connection, 0, monotonic()

    def add(self, count: int) -> None:
        self.bytes += count
        if monotonic() - self.sent > REPORT_SECONDS:
            self.send()

    def send(self) -> None:
        self.connection.send(("progress", self.bytes))
        self.bytes, self.sent = 0, monotonic()
