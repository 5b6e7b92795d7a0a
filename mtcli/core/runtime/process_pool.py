"""Worker processes: ordered results, progress, one error for all, and the memory that they used.

`ProcessPool` passes items to long-lived workers, for preprocess; `run_parts` gives each worker one
part of work of known size, for shard. No worker outlives its parent, however the parent died.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar, cast

from mtcli.core.config.errors import MtcliError, failed

PRELOADED = ["mtcli.core.convert.shard"]
REPORT_SECONDS = 0.1  # between two reports of a worker's progress
FEWER = "is memory short? fewer processes take less of it"

Progress = Callable[
    [float], None
]  # called with the amount of work done since its last call, such as bytes
Item = TypeVar("Item")
Result = TypeVar("Result")


class ProcessMemory(NamedTuple):
    """Resident bytes of a process: the peak, and the peak's increase over the start."""

    peak: int = 0
    working: int = 0

    def or_more(self, other: "ProcessMemory") -> "ProcessMemory":
        """The maximum of both, field by field."""
        return ProcessMemory(max(self.peak, other.peak), max(self.working, other.working))


class MemoryWatch:
    """Measures the resident memory of this process from its creation on."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
        self.start = _resident("VmRSS")

    def read(self) -> ProcessMemory:
        """The peak since the start."""
        peak = _resident("VmHWM")
        return ProcessMemory(peak, max(0, peak - self.start))


class WorkerReply(NamedTuple):
    """A worker's answer to one item: its result or its error, and its memory so far."""

    result: Any
    error: Exception | None
    progress: float  # not reported before
    memory: ProcessMemory


class ProcessPool(Generic[Item, Result]):
    """`workers` processes that each run `work(item, progress)`, one item at a time.

    An item is taken from its iterable only when a worker is free, so a lazy iterable bounds the
    items in flight. Without a context workers are forked on Linux (no start-up cost, `work` is
    inherited), else spawned. `hint` is shown where a worker was killed.
    """

    def __init__(
        self,
        work: Callable[[Item, Progress], Result],
        workers: int,
        hint: str = FEWER,
        context: BaseContext | None = None,
    ) -> None:
        if context is None:
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._hint = hint
        self._workers: dict[Connection, Any] = {}
        for _ in range(workers):
            ours, theirs = context.Pipe()
            # A forked child inherits our ends: it closes them, or it would never see us die.
            inherited = [*self._workers, ours] if context.get_start_method() == "fork" else []
            process = context.Process(  # type: ignore[attr-defined]  # typeshed: of its subclasses
                target=_serve, args=(work, theirs, inherited), daemon=True
            )
            process.start()
            theirs.close()
            self._workers[ours] = process

    def __enter__(self) -> "ProcessPool[Item, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        for end, process in self._workers.items():
            process.kill()
            end.close()
        for process in self._workers.values():
            process.join()

    def map(self, items: Iterable[Item], progress: Progress = lambda _: None) -> Iterator[Result]:
        """Yields the result of every item, in the order of the items.

        The first item that fails, in that order, raises its error here, as MtcliError. Progress is
        reported in any order. Raises MtcliError where a worker dies.
        """
        done: dict[int, WorkerReply] = {}
        following = 0
        for number, reply in self.replies(items, progress):
            done[number] = reply
            while following in done:
                result, error, *_ = done.pop(following)
                if isinstance(error, MtcliError):
                    raise error
                if error is not None:
                    raise failed(f"{type(error).__name__} in a worker: {error}") from error
                yield result
                following += 1

    def replies(
        self, items: Iterable[Item], progress: Progress
    ) -> Iterator[tuple[int, WorkerReply]]:
        """Yields (item number, reply) as workers finish. Raises MtcliError where one dies."""
        numbered = enumerate(items)
        busy: dict[Connection, int] = {}

        def hand_next(end: Connection) -> None:
            for number, item in islice(numbered, 1):
                try:
                    end.send(item)
                except (BrokenPipeError, ConnectionResetError):
                    raise self._died(end) from None
                busy[end] = number

        for end in self._workers:
            hand_next(end)
        while busy:
            for end in cast(list[Connection], wait(list(busy))):
                try:
                    message = end.recv()  # pickled by our own process, never read from a file
                except (EOFError, ConnectionResetError):
                    raise self._died(end) from None
                if isinstance(message, WorkerReply):
                    progress(message.progress)
                    yield busy.pop(end), message
                    hand_next(end)
                else:
                    progress(message)

    def _died(self, end: Connection) -> MtcliError:
        process = self._workers[end]
        process.join()
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return failed(f"worker process {process.pid} died with {how}", self._hint)


def shares(weights: Sequence[int], count: int) -> list[list[int]]:
    """Divides indices into at most `count` parts of similar weight; none is empty."""
    parts: list[list[int]] = [[] for _ in range(max(1, min(count, len(weights))))]
    loads = [0] * len(parts)
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        least = loads.index(min(loads))
        parts[least].append(index)
        loads[least] += max(1, weights[index])
    return [sorted(part) for part in parts]


def run_parts(
    work: Callable[[list[Item], Progress], Result], parts: list[list[Item]], progress: Progress
) -> tuple[list[Result], ProcessMemory]:
    """Runs `work(part, progress)` in a process per part, in this process for a single part. Returns
    (results, the most memory that a worker used).

    `work` is a module-level function, or a partial of one. Workers are forked from a server that
    has imported torch and computed nothing, as a fork of a process that used OpenMP may hang. They
    need no process group: no two parts touch the same file or tensor. The first failure ends all
    workers: its exception is raised, or MtcliError (exit 1) where a worker was killed.
    """
    if len(parts) < 2:
        return [work(part, progress) for part in parts], ProcessMemory()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results: dict[int, Result] = {}
    memory = ProcessMemory()
    hint = "is memory short? fewer --nproc take less of it"
    with ProcessPool(partial(_on_one_thread, work), len(parts), hint, context) as pool:
        for number, reply in pool.replies(parts, progress):
            if reply.error is not None:
                raise reply.error
            results[number], memory = reply.result, memory.or_more(reply.memory)
    return [results[number] for number in range(len(parts))], memory


def end_with(pipe: int, cleanup: Callable[[], object] = lambda: None) -> None:
    """Ends this process, after `cleanup`, when the last write end of a pipe closes: the system
    closes the files of a dead process, after SIGKILL too.

    A thread waits, so call it after forking. Unlike PR_SET_PDEATHSIG it works on macOS, and across
    a fork server, whose workers are not the caller's children.
    """

    def watch() -> None:
        wait([pipe])
        cleanup()
        os._exit(1)

    Thread(target=watch, name="mtcli-lifeline", daemon=True).start()


def _serve(
    work: Callable[[Any, Progress], Any], end: Connection, inherited: list[Connection]
) -> None:
    """Runs a worker until the other end closes, or it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a worker"
    end_with(parent.sentinel)  # in the middle of an item too
    watch = MemoryWatch()
    unreported, reported = 0.0, monotonic()

    def report(count: float) -> None:
        nonlocal unreported, reported
        unreported += count
        if monotonic() - reported > REPORT_SECONDS:
            end.send(unreported)
            unreported, reported = 0.0, monotonic()

    while True:
        try:
            item = end.recv()
        except EOFError:
            return
        result, failure = None, None
        try:
            result = work(item, report)
        except Exception as error:  # any: the parent raises it
            error.add_note(traceback.format_exc())
            failure = error
        end.send(WorkerReply(result, failure, unreported, watch.read()))
        unreported = 0.0


def _on_one_thread(
    work: Callable[[list[Item], Progress], Result], part: list[Item], progress: Progress
) -> Result:
    import torch

    torch.set_num_threads(1)
    return work(part, progress)


def _resident(kind: str) -> int:
    """VmRSS or VmHWM of this process in bytes; without /proc its peak for both."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))
