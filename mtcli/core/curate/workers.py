"""Maps work over processes with a progress bar, or in this process where there is one worker."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mtcli.core.runtime.process_pool import ProcessPool, Progress
from mtcli.core.runtime.progress import progress_bar

KILLED = "signal 9 is most often the system short of memory: try fewer --workers, and --resume"

Work = Callable[[Any, Progress], Any]


def run(
    workers: int, work: Work, items: Sequence[Any], total: float, what: str, unit: str = "it"
) -> Iterator[Any]:
    """Yields `work(item, progress)` of each item, in order, from at most `workers` processes."""
    workers = min(workers, len(items))
    bar = progress_bar(what, total, unit, leave=False)
    if workers < 2:
        with bar:
            for item in items:
                yield work(item, bar.update)
        return
    with ProcessPool(work, workers, KILLED) as pool, bar:
        yield from pool.map(items, bar.update)
