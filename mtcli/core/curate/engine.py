"""Defines the engine that runs a pipeline's work, and the one on this machine's processes.

An engine maps over items, writes parts, and does what needs the documents of all parts:
deduplication and shards. All engines write the same bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mtcli.core.curate.config import FuzzyConfig
from mtcli.core.curate.corpus import Corpus, Removals
from mtcli.core.curate.exact import find_same
from mtcli.core.curate.fuzzy import find_near
from mtcli.core.curate.parts import Files, Folder
from mtcli.core.curate.shards import ShardJob, gather_routes, route_slice, write_shard
from mtcli.core.curate.workers import Work, run
from mtcli.core.runtime.process_pool import Progress

LIGHT_ITEMS = 64  # of a millisecond or two each: a process takes 25 ms to start and to end
Make = Callable[[Any, Path, Progress], None]  # writes the files of an item into a folder


class Engine(Protocol):
    """The processes or the cluster that a pipeline runs on."""

    def map(
        self, work: Work, items: Sequence[Any], total: float, what: str, unit: str = "it"
    ) -> Iterator[Any]:
        """Yields `work(item, progress)` of each item, in order; for work of at most a part each."""

    def make(
        self, work: Make, items: Mapping[int, Any], folder: Path, what: str, unit: str = "it"
    ) -> Mapping[int, Files]:
        """Runs `work(item, folder, progress)` for each item; returns the files it wrote, by item.

        Where `unit` is "B", progress is counted in the items' `size`.
        """

    def same(self, corpus: Corpus, priority: tuple[str, ...]) -> Removals:
        """Finds exact duplicates."""

    def near(
        self, corpus: Corpus, config: FuzzyConfig, priority: tuple[str, ...], folder: Path
    ) -> Removals:
        """Finds near duplicates; spills candidates to `folder`."""

    def write(self, job: ShardJob) -> list[dict[str, Any]]:
        """Writes the missing shards; returns the name, documents and bytes of each."""


class LocalEngine(NamedTuple):
    """Processes of this machine; a resumed run continues from the folders they wrote."""

    workers: int

    def map(
        self, work: Work, items: Sequence[Any], total: float, what: str, unit: str = "it"
    ) -> Iterator[Any]:
        """Maps over forked processes, where there are enough items for several."""
        workers = min(self.workers, len(items) // LIGHT_ITEMS)
        return run(workers, work, items, total, what, unit)

    def make(
        self, work: Make, items: Mapping[int, Any], folder: Path, what: str, unit: str = "it"
    ) -> Mapping[int, Files]:
        """Runs `work` for the folders that are missing."""
        folder.mkdir(exist_ok=True)
        paths = {number: folder / f"{number:06d}" for number in items}
        missing = [(path, items[number]) for number, path in paths.items() if not path.exists()]
        total = sum(item.size if unit == "B" else 1 for _, item in missing)
        for _ in run(self.workers, partial(_make, work, unit), missing, total, what, unit):
            pass
        return {number: Folder(path) for number, path in paths.items()}

    def same(self, corpus: Corpus, priority: tuple[str, ...]) -> Removals:
        """Finds exact duplicates by sorting the hashes of all texts."""
        return find_same(corpus, priority)

    def near(
        self, corpus: Corpus, config: FuzzyConfig, priority: tuple[str, ...], folder: Path
    ) -> Removals:
        """Sorts each band's hashes in a process, and joins the pairs in this process."""
        return find_near(corpus, config, priority, folder, partial(run, self.workers))

    def write(self, job: ShardJob) -> list[dict[str, Any]]:
        """Routes documents to shards in this process; each worker writes one shard at a time."""
        slices = list(job.corpus.new_slices().values())
        routes = self.map(partial(route_slice, job.plan), slices, len(slices), "sort ids")
        count = len(job.plan.names)
        work = partial(write_shard, job, gather_routes(list(routes), job.plan))
        return list(run(self.workers, work, range(count), count, "write shards"))


def _make(work: Make, unit: str, item: tuple[Path, Any], progress: Progress) -> None:
    path, argument = item
    work(argument, path, progress)
    if unit != "B":
        progress(1)
