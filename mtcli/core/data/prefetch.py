"""Reads batches ahead in a thread."""

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from typing import Generic, TypeVar, cast

END = object()
Ready = TypeVar("Ready")


class Prefetcher(Generic[Ready]):
    """Iterates over `read(start, count)`, such as `Batches.batch`, of all `spans`, reading ahead.

    A thread keeps up to `depth` results ready; copying tokens releases the GIL. An error in the
    thread is raised where its result would have come. Call `close`, or use `with`.
    """

    def __init__(
        self, read: Callable[[int, int], Ready], spans: Iterable[tuple[int, int]], depth: int = 4
    ) -> None:
        self._ready: Queue[object] = Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(read, spans), name="prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Ready]:
        """Yields the results in the order of `spans`."""
        while (item := self._ready.get()) is not END:
            if isinstance(item, BaseException):
                raise item
            yield cast(Ready, item)

    def __enter__(self) -> "Prefetcher[Ready]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the thread and drops results that are ready."""
        self._stopped.set()
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _fill(self, read: Callable[[int, int], Ready], spans: Iterable[tuple[int, int]]) -> None:
        last: object = END
        try:
            for start, count in spans:
                if self._stopped.is_set():
                    return
                self._ready.put(read(start, count))
        except BaseException as error:  # handed to the thread that iterates
            last = error
        self._ready.put(last)
