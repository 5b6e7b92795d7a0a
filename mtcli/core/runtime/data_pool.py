"""Worker processes that do blocks of work and hand their results back in order."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from mtcli.core.config.errors import Exit, MtcliError, Problem, failed
from mtcli.core.runtime.lifeline import end_with_parent

Tell = Callable[[float], None]
Reply = tuple[object, tuple[tuple[Problem, ...], Exit] | None]  # a result, or what is wrong
Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool(Generic[Item, Result]):
    """`workers` processes that each run `work(item, tell)`, one item at a time.

    Items are taken from their iterable only when a worker is free, so a lazy one bounds what is in
    flight. Workers are forked on Linux (no start-up cost, `work` is inherited), else spawned.
    """

    def __init__(self, work: Callable[[Item, Tell], Result], workers: int) -> None:
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        forked = context.get_start_method() == "fork"
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            # A forked child inherits our ends: it closes them, or it would never see us die.
            inherited = [*self._ends, ours] if forked else []
            process = context.Process(target=_serve, args=(work, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Pool[Item, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            process.terminate()
            end.close()
        for process in self._processes:
            process.join()

    def map(self, items: Iterable[Item], tell: Tell = lambda _: None) -> Iterator[Result]:
        """`work` of every item, in the order of the items.

        What `work` tells of its progress, a number, is told to `tell` here, in any order.
        The first item that fails, in that order, raises its error here. Raises MtcliError where a
        worker dies.
        """
        numbered = enumerate(items)
        free, busy, done = list(self._ends), {}, {}
        following, more = 0, True
        while True:
            while free and more:
                number, item = next(numbered, (None, None))
                more = number is not None
                if more:
                    end = free.pop()
                    self._send(end, item)
                    busy[end] = number
            if not busy:
                return
            for end in wait(list(busy)):
                answer = self._receive(end)
                if isinstance(answer, float):
                    tell(answer)
                    continue
                done[busy.pop(end)] = answer
                free.append(end)
            while following in done:
                yield _opened(done.pop(following))
                following += 1

    def _send(self, end: Connection, item: Item) -> None:
        try:
            end.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(end) from None

    def _receive(self, end: Connection) -> Reply | float:
        """Receives a worker's message: an item's answer, or its progress."""
        try:
            return end.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(end) from None

    def _died(self, end: Connection) -> MtcliError:
        process = self._processes[self._ends.index(end)]
        process.join()
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return failed(
            f"worker process {process.pid} died with {how}",
            "signal 9 is most often the system short of memory: try fewer --workers, and --resume",
        )


def default_workers() -> int:
    """As many as there are cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _serve(
    work: Callable[[Item, Tell], Result], end: Connection, inherited: list[Connection]
) -> None:
    """A worker's life: until the other end closes, or it is terminated."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    end_with_parent()  # in the middle of an item too
    while True:
        try:
            item = end.recv()
        except EOFError:
            return
        try:
            answer = (work(item, lambda count: end.send(float(count))), None)
        except MtcliError as error:
            answer = (None, (error.problems, error.code))
        except Exception as error:  # the parent raises it, as it would its own
            problem = Problem(f"{type(error).__name__} in a worker: {error}")
            answer = (None, ((problem,), Exit.FAILED))
        end.send(answer)


def _opened(answer: Reply) -> Any:
    result, error = answer
    if error is not None:
        problems, code = error
        raise MtcliError(*problems, code=code)
    return result
