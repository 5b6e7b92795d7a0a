"""Writes the remaining documents as shards: JSON lines under Zstandard, sorted by id.

A sample of all ids divides them into shards whose lines fit in memory; with a blend, each source
has its own shards.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mtcli.core.curate.corpus import ChangedLines, Corpus, Slice
from mtcli.core.curate.hashing import Array
from mtcli.core.curate.parts import LINES, Lines, Part
from mtcli.core.runtime.atomic_writes import atomic_file
from mtcli.core.runtime.process_pool import Progress

LEVEL = 3  # of compression
SAMPLED = 64  # keys of a part that say where shards begin
NAME = "shard"
CUT_CHARACTERS = 50  # of a longer name, at most 4 bytes each
MOST_NAME_BYTES = 200  # of a source, in file names of at most 255 with number and ending


class ShardPlan(NamedTuple):
    """The division of sort keys into shards: the first key of each shard but the first, and the
    file names."""

    splitters: tuple[bytes, ...]
    names: tuple[str, ...]
    by_source: bool


class Routes(NamedTuple):
    """Document numbers ordered by shard: shard s has numbers[bounds[s] : bounds[s + 1]]."""

    numbers: Array
    bounds: Array


def sample_keys(
    by_source: bool, view: Slice, progress: Progress = lambda _: None
) -> list[tuple[bytes, int]]:
    """Samples the sort keys of a part, each with the bytes of the lines from it to the next."""
    keys = sort_keys(view.part, by_source)
    order = sorted(np.flatnonzero(view.alive).tolist(), key=keys.__getitem__)
    lengths = np.diff(view.part.array("line_ends"), prepend=0)
    step = max(1, -(-len(order) // SAMPLED))
    runs = [order[start : start + step] for start in range(0, len(order), step)]
    progress(1)
    return [(keys[members[0]], int(lengths[members].sum())) for members in runs]


def plan_shards(
    samples: Iterable[list[tuple[bytes, int]]], shard_bytes: int, by_source: bool
) -> ShardPlan:
    """Divides the sort keys so that shards have about `shard_bytes` of lines each."""
    sampled = sorted(chain.from_iterable(samples))
    sources = sorted({key.partition(b"\0")[0] for key, _ in sampled}) if by_source else [b""]
    splitters: list[bytes] = []
    names: list[str] = []
    if not sampled:
        return ShardPlan((), (), by_source)
    for source in sources:
        chosen = [pair for pair in sampled if not by_source or pair[0].startswith(source + b"\0")]
        inner = _splitters(chosen, shard_bytes)
        splitters += [source + b"\0", *inner] if by_source else inner
        stem = source.decode() if by_source else NAME
        names += [f"{file_stem(stem)}-{number:05d}.jsonl.zst" for number in range(len(inner) + 1)]
    return ShardPlan(tuple(splitters[1:] if by_source else splitters), tuple(names), by_source)


def _splitters(sampled: Iterable[tuple[bytes, int]], shard_bytes: int) -> list[bytes]:
    splitters, filled = [], 0
    for key, size in sampled:
        if filled and filled + size > shard_bytes:
            splitters.append(key)
            filled = 0
        filled += size
    return splitters


def file_stem(source: str) -> str:
    """Makes a file name's stem of a source's name.

    Unsafe characters are replaced and a long name is cut; a hash is then appended.
    """
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in source).lstrip(".") or "_"
    if safe == source and len(safe.encode()) <= MOST_NAME_BYTES:
        return safe
    return f"{safe[:CUT_CHARACTERS]}-{xxhash.xxh32_hexdigest(source.encode())}"


def sort_keys(part: Part, by_source: bool) -> list[bytes]:
    """Builds the sort keys of a part's documents [documents]."""
    keys = part.keys()
    if not by_source:
        return keys
    names = [name.encode("utf-8", "surrogatepass") + b"\0" for name in part.summary["sources"]]
    return [names[source] + key for source, key in zip(part.array("sources"), keys, strict=True)]


def route_slice(plan: ShardPlan, view: Slice, progress: Progress = lambda _: None) -> Array:
    """Finds the shard of each document of a part [documents]; -1 for removed ones."""
    shards = np.zeros(view.part.count, np.int32)
    if plan.splitters:
        keys = sort_keys(view.part, plan.by_source)
        shards[:] = [bisect_right(plan.splitters, key) for key in keys]
    shards[~view.alive] = -1
    progress(1)
    return shards


def gather_routes(routes: Sequence[Array], plan: ShardPlan) -> Routes:
    """Sorts documents by their shards."""
    shards = np.concatenate([np.zeros(0, np.int32), *routes])
    order = np.argsort(shards, kind="stable")
    bounds = np.searchsorted(shards[order], np.arange(len(plan.names) + 1))
    return Routes(order, bounds)


class ShardJob(NamedTuple):
    """The corpus and plan that shards are written from; `changed` holds by part the new lines of
    cut documents."""

    corpus: Corpus
    plan: ShardPlan
    folder: Path
    changed: Mapping[int, ChangedLines]


def write_shard(
    job: ShardJob, routes: Routes, number: int, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Writes a shard where it is missing; returns its name, documents and bytes of lines."""
    facts = write_lines(job.folder / job.plan.names[number], sorted(_lines_of(job, routes, number)))
    progress(1)
    return facts


def write_lines(path: Path, lines: Sequence[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Writes the lines of (key, line) as a shard where it is missing."""
    import zstandard

    if not path.exists():
        with atomic_file(path) as aside, open(aside, "wb") as file:
            compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
            file.write(compressor.compress(b"".join([line for _, line in lines])))
    size = sum([len(line) for _, line in lines])
    documents = sum([line.count(b"\n") for _, line in lines])  # several of one that was cut apart
    return {"name": path.name, "documents": documents, "bytes": size}


def _lines_of(job: ShardJob, routes: Routes, number: int) -> list[tuple[bytes, bytes]]:
    """Collects (sort key, line) of each document of a shard."""
    corpus = job.corpus
    numbers = routes.numbers[routes.bounds[number] : routes.bounds[number + 1]]
    lines = []
    owners = corpus.owners(numbers)
    for index in np.unique(owners).tolist():
        part = corpus.parts[index]
        rows = (numbers[owners == index] - corpus.bounds[index]).tolist()
        lines += keyed_lines(part, rows, job.plan.by_source, job.changed.get(index))
    return lines


def keyed_lines(
    part: Part, rows: Sequence[int], by_source: bool, changed: ChangedLines | None
) -> list[tuple[bytes, bytes]]:
    """Returns (sort key, line) of some documents of a part."""
    keys, lines, edits = sort_keys(part, by_source), part.lines, changed_lines(changed)
    return [(keys[row], edits[row] if row in edits else lines[row]) for row in rows]


def changed_lines(changed: ChangedLines | None) -> dict[int, bytes]:
    """Reads the new lines of cut documents, by row."""
    if changed is None:
        return {}
    rows, files = changed
    lines = Lines(files.data(LINES), files.array("line_ends"))
    return {row: lines[index] for index, row in enumerate(rows.tolist())}
