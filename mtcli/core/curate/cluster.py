"""Runs a curation on many machines: tasks over groups of parts, and shuffles between them.

Texts, signatures and bands stay in the cluster as objects that tasks return. A phase divides its
output by a hash or a range into as many partitions as there are groups; task p of the next phase
gets partition p from every task. The head holds a few bytes per document and writes the report.
Decisions are those of a single machine, so the output has the same bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np

from mtcli.core.config.errors import failed
from mtcli.core.curate.components import (
    both_ways,
    checksum,
    downwards,
    large_star,
    once,
    small_star,
)
from mtcli.core.curate.config import FuzzyConfig
from mtcli.core.curate.corpus import ChangedLines, Corpus, Removals, Slice, decide, table_of
from mtcli.core.curate.engine import Make
from mtcli.core.curate.exact import same_texts
from mtcli.core.curate.fuzzy import (
    Buckets,
    Components,
    PairFilter,
    Pairs,
    likely_pairs,
    min_matches,
    unique_pairs,
)
from mtcli.core.curate.hashing import Array, jaccard, runs
from mtcli.core.curate.parts import LINES, Files, Part
from mtcli.core.curate.shards import ShardJob, ShardPlan, keyed_lines, route_slice, write_lines
from mtcli.core.curate.workers import Work

GROUP_PARTS = 512  # of about 8 MB of input each: what a task works through
SETS = 4096  # of shingles that a task holds while it verifies pairs
# Files that are read without the rest of their part; others are one object together.
SLOTS = {LINES: 0, "signatures.npy": 1, "bands.npy": 2, "matches.npy": 3, "num_matches.npy": 3}
REST = 4

Ref = Callable[[], Any]  # a value that a task returned, fetched by calling it
Results = tuple[Any, ...]  # all that a task returns
Task = Callable[[Any], Results]
Group = tuple[Slice, ...]


class Cluster(Protocol):
    """A set of machines that runs tasks."""

    @property
    def cores(self) -> int:
        """The number of tasks that run at a time."""

    def run(
        self, function: Task, items: Sequence[Any], what: str, returns: int = 1
    ) -> list[tuple[Ref, ...]]:
        """Runs `function(item)` as a task for each item and waits; returns per task `returns`
        references to its results.

        Raises the first task's error.
        """


class Objects:
    """The files of a part that a task wrote, held as objects of the cluster."""

    def __init__(self, slots: Sequence[Ref | None]) -> None:
        self._slots = tuple(slots)

    def only(self, *names: str) -> "Objects":
        """Selects the large files by name, and the small ones with them, so that a task fetches no
        other."""
        slots = {REST, *(SLOTS[name] for name in names)}
        return Objects([ref if i in slots else None for i, ref in enumerate(self._slots)])

    def array(self, name: str) -> Array:
        """Fetches an array."""
        return self._file(f"{name}.npy")

    def data(self, name: str) -> Any:
        """Fetches a file's bytes."""
        return self._file(name).data

    def _file(self, name: str) -> Array:
        slot = self._slots[SLOTS.get(name, REST)]
        assert slot is not None, f"{name} was left out"
        array: Array = slot()[name]
        return array


class ClusterEngine(NamedTuple):
    """An engine whose parts are objects of a cluster; it writes no file but the shards."""

    cluster: Cluster

    def map(
        self, work: Work, items: Sequence[Any], total: float, what: str, unit: str = "it"
    ) -> Iterator[Any]:
        """Maps with a task per item; a part comes without its texts and signatures."""
        lean = [_lean(item) if isinstance(item, Slice) else item for item in items]
        for (ref,) in self.cluster.run(partial(_plain, work), lean, what):
            yield ref()

    def make(
        self, work: Make, items: Mapping[int, Any], folder: Path, what: str, unit: str = "it"
    ) -> Mapping[int, Files]:
        """Runs `work` in a task per item; the files it writes become objects of the cluster."""
        rows = self.cluster.run(partial(_packed, work), list(items.values()), what, REST + 1)
        return {number: Objects(slots) for number, slots in zip(items, rows, strict=True)}

    def same(self, corpus: Corpus, priority: tuple[str, ...]) -> Removals:
        """Finds exact duplicates by a shuffle of text hashes."""
        groups = self._groups(corpus)
        run, count = self.cluster.run, len(groups)
        rows = run(partial(_split_texts, count), _leaner(groups), "exact: shuffle", count)
        stars = _only(run(_same_stars, _transposed(rows), "exact: group"))
        return table_of(_gathered(self._decided(corpus, groups, stars, priority)))

    def near(
        self, corpus: Corpus, config: FuzzyConfig, priority: tuple[str, ...], folder: Path
    ) -> Removals:
        """Finds near duplicates: shuffles bands by hash, then pairs, then edges of verified
        pairs."""
        groups = self._groups(corpus)
        run, count = self.cluster.run, len(groups)
        lean_groups = _leaner(groups, "bands.npy")
        rows = run(partial(_split_bands, count), lean_groups, "fuzzy: shuffle bands", count)
        buckets = run(_buckets, _transposed(rows), "fuzzy: buckets", 2)
        lean_groups = _leaner(groups, "signatures.npy")
        signatures = self._look_up(lean_groups, [row[1] for row in buckets], _signatures)
        work = partial(_likely_pairs, count, corpus.num_new, min_matches(config))
        items = [(*row, refs) for row, refs in zip(buckets, signatures, strict=True)]
        likely = run(work, items, "fuzzy: pairs", count)
        pairs = run(_unique, _transposed(likely), "fuzzy: pairs", 2)
        edges = self._compared(groups, pairs, partial(_edges, config.shingle, config.threshold))
        tables = self._decided(corpus, groups, self._stars(edges), priority)
        compared = run(_kept_pairs, tables, "fuzzy: kept", 2)
        shares = self._compared(groups, compared, partial(_jaccards, config.shingle))
        removals = _gathered(tables)
        values = np.concatenate([share() for share in shares])
        ordered = values[np.argsort(removals[:, 0], kind="stable")]
        return table_of(removals)._replace(jaccard=ordered)

    def write(self, job: ShardJob) -> list[dict[str, Any]]:
        """Shuffles lines by ranges of their keys, and writes the shards of a range in one task."""
        names = job.plan.names
        if not names:
            return []
        groups = self._groups(job.corpus)
        run, count = self.cluster.run, len(groups)
        changed = {job.corpus.slice(index).first: lines for index, lines in job.changed.items()}
        rows = run(
            partial(_split_lines, job.plan, count),
            [
                (group, [changed.get(view.first) for view in group])
                for group in _leaner(groups, LINES)
            ],
            "shuffle lines",
            count,
        )
        items = list(enumerate(_transposed(rows)))
        written = run(partial(_write_shards, names, count, job.folder), items, "write shards")
        shards = [shard for (ref,) in written for shard in ref()]
        if missing := [name for name in names if not (job.folder / name).exists()]:
            said = f"{len(missing)} of {len(names)} shards that other nodes wrote are not here"
            raise failed(said, f"{job.folder} must be one folder on all nodes")
        return shards

    def _groups(self, corpus: Corpus) -> list[Group]:
        """Divides adjacent parts into groups: two for each core, or more of at most GROUP_PARTS."""
        count = len(corpus.parts)
        groups = min(count, max(2 * self.cluster.cores, -(-count // GROUP_PARTS)))
        bounds = [count * number // groups for number in range(groups + 1)]
        return [
            tuple(corpus.slice(index) for index in range(start, stop))
            for start, stop in zip(bounds, bounds[1:], strict=False)
        ]

    def _look_up(
        self, groups: list[Group], queries: Sequence[Ref], read: Callable[[Group, Array], Any]
    ) -> list[tuple[Ref, ...]]:
        """Reads the sorted document numbers of each partition with `read(group, numbers)`, in the
        groups that hold them; returns by partition the rows from each group."""
        count = len(groups)
        starts = np.array([group[0].first for group in groups[1:]], np.int64)
        asked = self.cluster.run(partial(_by_group, starts), queries, "look up", count)
        items = list(zip(groups, _transposed(asked), strict=True))
        return _transposed(self.cluster.run(partial(_rows, read), items, "look up", count))

    def _compared(
        self, groups: list[Group], pairs: Sequence[tuple[Ref, ...]], work: Task
    ) -> list[Ref]:
        """Runs `work` over (pairs, their documents' numbers, their texts) of each partition."""
        texts = self._look_up(_leaner(groups, LINES), [row[1] for row in pairs], _texts)
        items = [(*row, refs) for row, refs in zip(pairs, texts, strict=True)]
        return _only(self.cluster.run(work, items, "fuzzy: verify"))

    def _stars(self, edges: list[Ref]) -> list[Ref]:
        """Reduces edges to (document, smallest of its component), a component in one partition."""
        run, count = self.cluster.run, len(edges)
        previous, now = None, [0]
        while now != previous:
            for split, step in ((both_ways, large_star), (downwards, small_star)):
                rows = run(partial(_split_edges, split, 0, count), edges, "components", count)
                starred = run(partial(_star, step), _transposed(rows), "components", 2)
                edges = [row[0] for row in starred]
            previous, now = now, [sum(row[1]() for row in starred) % (1 << 64)]
        rows = run(partial(_split_edges, once, 1, count), edges, "components", count)
        return _only(run(partial(_star, once), _transposed(rows), "components", 2))

    def _decided(
        self, corpus: Corpus, groups: list[Group], stars: list[Ref], priority: tuple[str, ...]
    ) -> list[Ref]:
        """Returns (removed, kept, root) of the components of each partition."""
        members = _only(self.cluster.run(_members, stars, "decide"))
        names = self._look_up(_leaner(groups), members, _names)
        items = list(zip(stars, members, names, strict=True))
        work = partial(_decide, corpus.num_new, priority)
        return _only(self.cluster.run(work, items, "decide"))


def _leaner(groups: Sequence[Group], *names: str) -> list[Group]:
    """Returns groups with the named large files only."""
    return [tuple(_lean(view, *names) for view in group) for group in groups]


def _lean(view: Slice, *names: str) -> Slice:
    files = view.part.files
    assert isinstance(files, Objects), "made by this engine"
    return view._replace(part=Part(files.only(*names), view.part.against))


# What tasks do: each is given an item, and returns a tuple


def _plain(work: Work, item: Any) -> Results:
    return (work(item, _quiet),)


def _packed(work: Make, item: Any) -> Results:
    slots: list[dict[str, Array]] = [{} for _ in range(REST + 1)]
    with TemporaryDirectory() as name:
        folder = Path(name) / "part"
        work(item, folder, _quiet)
        for path in sorted(folder.iterdir()):
            is_array = path.suffix == ".npy"
            read = np.load(path) if is_array else np.fromfile(path, np.uint8)
            slots[SLOTS.get(path.name, REST)][path.name] = read
    return tuple(slots)


def _quiet(_: float) -> None:
    """Discards progress."""


def _split_texts(count: int, group: Group) -> Results:
    hashes = [view.part.array("text_hash").reshape(-1, 2)[view.alive] for view in group]
    numbers = np.concatenate([view.numbers for view in group])
    return _divided(np.concatenate([*hashes]), numbers, count)


def _divided(keys: Array, numbers: Array, count: int) -> Results:
    """Divides (keys, numbers) into partitions, by the key or its first column."""
    partitions = (keys if keys.ndim == 1 else keys[:, 0]) % np.uint64(count)
    order = np.argsort(partitions, kind="stable")
    bounds = np.searchsorted(partitions[order], np.arange(1, count, dtype=np.uint64))
    split = zip(np.split(keys[order], bounds), np.split(numbers[order], bounds), strict=True)
    return tuple(split)


def _same_stars(rows: Sequence[Ref]) -> Results:
    hashes, numbers = map(np.concatenate, zip(*(ref() for ref in rows), strict=True))
    first = numbers[same_texts(hashes)]
    other = first != numbers
    return (np.stack([numbers[other], first[other]], axis=1),)


def _split_bands(count: int, group: Group) -> Results:
    parts = []
    for view in group:
        keys = view.part.array("bands")[:, view.alive]
        # A band's number is mixed in, so that no two bands share a bucket.
        salted = keys + (np.arange(len(keys), dtype=np.uint64) << np.uint64(1))[:, None]
        parts.append((salted.ravel(), np.tile(view.numbers, len(keys))))
    keys, numbers = map(np.concatenate, zip(*parts, strict=True))
    return _divided(keys, numbers, count)


def _buckets(rows: Sequence[Ref]) -> tuple[Buckets, Array]:
    """Collects the buckets of at least two documents, and their documents' numbers."""
    keys, numbers = map(np.concatenate, zip(*(ref() for ref in rows), strict=True))
    order = np.lexsort((numbers, keys))
    keys, numbers = keys[order], numbers[order]
    _, sizes = runs(keys)
    numbers = numbers[np.repeat(sizes > 1, sizes)]
    sizes = sizes[sizes > 1]
    return Buckets(numbers, np.cumsum(sizes) - sizes, sizes), np.unique(numbers)


def _likely_pairs(
    count: int, num_new: int, least: int, item: tuple[Ref, Ref, Sequence[Ref]]
) -> Results:
    """Returns a partition's likely pairs, divided into partitions by their first document."""
    buckets, looked_up = item[0](), item[1]()
    rows = [block for ref in item[2] if len(block := ref())]
    signatures = np.concatenate(rows) if rows else np.zeros((0, 1), np.uint8)
    pair_filter = PairFilter(
        lambda some: signatures[np.searchsorted(looked_up, some)], num_new, least
    )
    pairs = likely_pairs(pair_filter, buckets)
    partitions = pairs.first % count
    return tuple(
        Pairs(*(column[partitions == index] for column in pairs)) for index in range(count)
    )


def _unique(rows: Sequence[Ref]) -> tuple[Array, Array]:
    """Returns pairs [pairs, 2], the most similar first, and the numbers in them."""
    pairs = unique_pairs([ref() for ref in rows])
    both = np.stack([pairs.first, pairs.second], axis=1).astype(np.int64)
    return both, np.unique(both)


def _edges(size: int, threshold: float, item: tuple[Ref, Ref, Sequence[Ref]]) -> Results:
    """Selects verified pairs, without those whose documents are already in one component."""
    components, edges = Components(), []
    similar = _Similarity(size, item)
    for pair in item[0]().tolist():
        if components.differ(*pair) and similar(*pair) >= threshold:
            components.join(*pair)
            edges.append(pair)
    return (np.array(edges, np.int64).reshape(-1, 2),)


def _jaccards(size: int, item: tuple[Ref, Ref, Sequence[Ref]]) -> Results:
    similar = _Similarity(size, item)
    return (np.array([similar(*pair) for pair in item[0]().tolist()], np.float64),)


class _Similarity:
    """The Jaccard similarity of two documents' shingles, from texts that were looked up."""

    def __init__(self, size: int, item: tuple[Ref, Ref, Sequence[Ref]]) -> None:
        texts = [text for ref in item[2] for text in ref()]
        self._texts = dict(zip(item[1]().tolist(), texts, strict=True))
        self._size, self._sets = size, dict[int, Array]()

    def __call__(self, one: int, other: int) -> float:
        return jaccard(self._set(one), self._set(other))

    def _set(self, number: int) -> Array:
        from mtcli.core.curate.shingles import shingle_set

        if number not in self._sets:
            if len(self._sets) >= SETS:
                self._sets.clear()
            self._sets[number] = shingle_set(self._texts[number], self._size)
        return self._sets[number]


def _split_edges(
    prepare: Callable[[Array], Array], column: int, count: int, ref: Ref
) -> tuple[Array, ...]:
    edges = prepare(ref())
    partitions = edges[:, column] % count
    return tuple(edges[partitions == index] for index in range(count))


def _star(step: Callable[[Array], Array], rows: Sequence[Ref]) -> tuple[Array, int]:
    edges = step(np.concatenate([ref() for ref in rows]))
    return edges, checksum(edges)


def _members(star: Ref) -> tuple[Array]:
    return (np.unique(star()),)


def _decide(
    num_new: int, priority: tuple[str, ...], item: tuple[Ref, Ref, Sequence[Ref]]
) -> tuple[Array]:
    """Decides (removed, kept, root) of stars, by the (key, source) looked up of each member."""
    star, looked_up = item[0](), item[1]()
    names = [name for ref in item[2] for name in ref()]
    star = star[np.lexsort((star[:, 0], star[:, 1]))]
    begins, _ = runs(star[:, 1])
    leaves = np.split(star[:, 0], begins[1:]) if len(star) else []
    clusters = [np.append(star[at, 1], some) for at, some in zip(begins, leaves, strict=True)]
    members = [np.searchsorted(looked_up, cluster).tolist() for cluster in clusters]
    ordered = [names[index] for indices in members for index in indices]
    return (decide(clusters, ordered, num_new, priority),)


def _kept_pairs(table: Ref) -> tuple[Array, Array]:
    pairs = table()[:, :2]
    return pairs, np.unique(pairs)


def _by_group(starts: Array, queries: Ref) -> tuple[Array, ...]:
    numbers = queries()
    return tuple(np.split(numbers, np.searchsorted(numbers, starts)))


def _rows(read: Callable[[Group, Array], Any], item: tuple[Group, Sequence[Ref]]) -> Results:
    """Reads the rows that all partitions ask for, and divides them by partition."""
    group, refs = item
    asked = [ref() for ref in refs]
    rows = read(group, np.concatenate(asked))
    bounds = np.cumsum([0, *map(len, asked)])
    return tuple(rows[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False))


def _signatures(group: Group, numbers: Array) -> Array:
    return _corpus(group).take("signatures", numbers - group[0].first)


def _names(group: Group, numbers: Array) -> list[tuple[bytes, str]]:
    corpus, rows = _corpus(group), numbers - group[0].first
    return list(zip(corpus.keys(rows), corpus.sources(rows), strict=True))


def _texts(group: Group, numbers: Array) -> list[str]:
    return _corpus(group).of_rows(numbers - group[0].first, lambda part: part.lines.text)


def _corpus(group: Group) -> Corpus:
    return Corpus([view.part for view in group])


def _split_lines(
    plan: ShardPlan, count: int, item: tuple[Group, Sequence[ChangedLines | None]]
) -> Results:
    """Divides (key, line) by partition and shard."""
    by_partition: list[dict[int, list[tuple[bytes, bytes]]]] = [{} for _ in range(count)]
    for view, changed in zip(*item, strict=True):
        if view.part.against:
            continue
        rows = np.flatnonzero(view.alive).tolist()
        shards = route_slice(plan, view)[rows].tolist()
        lines = keyed_lines(view.part, rows, plan.by_source, changed)
        for shard, line in zip(shards, lines, strict=True):
            partition = shard * count // len(plan.names)
            by_partition[partition].setdefault(shard, []).append(line)
    return tuple(by_partition)


def _write_shards(
    names: Sequence[str], count: int, folder: Path, item: tuple[int, Sequence[Ref]]
) -> tuple[list[dict[str, Any]]]:
    partition, refs = item
    lines: dict[int, list[tuple[bytes, bytes]]] = {}
    for ref in refs:
        for shard, some in ref().items():
            lines.setdefault(shard, []).extend(some)
    owned = [shard for shard in range(len(names)) if shard * count // len(names) == partition]
    return ([write_lines(folder / names[shard], sorted(lines.get(shard, []))) for shard in owned],)


def _transposed(rows: Sequence[Sequence[Ref]]) -> list[tuple[Ref, ...]]:
    return list(zip(*rows, strict=True))


def _only(rows: Sequence[tuple[Ref, ...]]) -> list[Ref]:
    return [row[0] for row in rows]


def _gathered(tables: Sequence[Ref]) -> Array:
    return np.concatenate([table() for table in tables])
