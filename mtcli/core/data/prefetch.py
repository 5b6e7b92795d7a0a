"""Batches made ready on a thread, so that a training step never waits for its data."""

import threading
from collections.abc import Iterable, Iterator
from queue import Queue

import numpy as np

from mtcli.core.data.batches import Batches

END = object()


class Prefetcher:
    """Iterates over `batches.batch(start, count)` for every (start, count) of `wanted`, in order.

    A thread keeps up to `depth` arrays ready; copying tokens leaves the interpreter to others. What
    it meets (a disk that fails) is raised where the array would have come. Close it, or use `with`.
    """

    def __init__(self, batches: Batches, wanted: Iterable[tuple[int, int]], depth: int = 4) -> None:
        self._ready: Queue[object] = Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(batches, wanted), name="prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[np.ndarray]:
        """The arrays int64 [count, seq_len + 1]."""
        while (item := self._ready.get()) is not END:
            if isinstance(item, BaseException):
                raise item
            yield item

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop what is ready."""
        self._stopped.set()
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _fill(self, batches: Batches, wanted: Iterable[tuple[int, int]]) -> None:
        last: object = END
        try:
            for start, count in wanted:
                if self._stopped.is_set():
                    return
                self._ready.put(batches.batch(start, count))
        except BaseException as error:  # handed to the thread that iterates
            last = error
        self._ready.put(last)
