"""Finds near duplicates: candidates that share a band, verified by the Jaccard similarity of their
shingles, joined into connected components.

Every duplicate pair is verified, the most similar candidates first, in rounds whose size does not
depend on the number of workers. A pair whose documents are already in one component is skipped,
which changes no component.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.curate.config import FuzzyConfig
from mtcli.core.curate.corpus import Corpus, Removals
from mtcli.core.curate.hashing import Array, changes, jaccard, runs
from mtcli.core.curate.minhash import bands_of
from mtcli.core.runtime.process_pool import Progress

ALL_PAIRS = 32  # documents of a bucket that are all compared with each other
WINDOW = 2048  # of larger ones, by signature
MOST_PARTNERS = 8  # of a document in such a window: the most alike
SIGMAS = 4.5  # below the threshold, in standard deviations of the estimate, no pair is verified
ROUND = 1 << 16  # pairs between two looks at the components
CHUNK = 256  # pairs that a worker verifies at a time
FILTERED = 1 << 16  # pairs whose signatures are compared together

Map = Callable[[Callable[[Any, Progress], Any], Sequence[Any], int, str], Iterator[Any]]
Numbers = tuple[int, int]  # of two documents


class Pairs(NamedTuple):
    """Pairs of document numbers, the smaller first, and how many signature values they share."""

    first: Array
    second: Array
    matches: Array


class Buckets(NamedTuple):
    """Document numbers by bucket, and the start and size of each bucket."""

    numbers: Array
    begins: Array
    sizes: Array


class PairFilter(NamedTuple):
    """The test for likely pairs: signatures by document number, the number of new documents (which
    come first), and the fewest equal signature values."""

    signatures: Callable[[Array], Array]
    num_new: int
    least: int


def min_matches(config: FuzzyConfig) -> int:
    """Returns the fewest equal signature values that a pair at the threshold has, with a miss rate
    of one in a hundred thousand; two values are equal by chance with probability 1/256."""
    expected = config.threshold + (1 - config.threshold) / 256
    sigma = (expected * (1 - expected) / config.hashes) ** 0.5
    return max(0, int((expected - SIGMAS * sigma) * config.hashes))


def find_near(
    corpus: Corpus, config: FuzzyConfig, priority: tuple[str, ...], folder: Path, run: Map
) -> Removals:
    """Finds near duplicates among the documents that are alive.

    Spills each band's candidates to `folder`. `run(work, items, count, what)` maps over worker
    processes, in order.
    """
    bands, _ = bands_of(config)
    folder.mkdir(exist_ok=True)
    numbers = np.flatnonzero(corpus.alive)
    find = partial(band_candidates, corpus, config, numbers, folder)
    for _ in run(find, range(bands), bands, "fuzzy: bands"):
        pass
    pairs = unique_pairs([Pairs(*np.load(_band_file(folder, band))) for band in range(bands)])
    verify = partial(verify_pairs, corpus, config.shingle)
    components = Components()
    jaccard_of: dict[tuple[int, int], float] = {}
    for start in range(0, len(pairs.first), ROUND):
        part = slice(start, start + ROUND)
        some = [
            pair
            for pair in zip(pairs.first[part].tolist(), pairs.second[part].tolist(), strict=True)
            if components.differ(*pair)
        ]
        for pair, similarity in zip(some, _verified(run, verify, some), strict=True):
            if similarity >= config.threshold:
                jaccard_of[pair] = similarity
                components.join(*pair)
    removals = corpus.removals(components.clusters(), priority)
    return removals._replace(
        jaccard=_jaccards(removals, jaccard_of, partial(_verified, run, verify))
    )


def band_candidates(
    corpus: Corpus,
    config: FuzzyConfig,
    numbers: Array,
    folder: Path,
    band: int,
    progress: Progress,
) -> None:
    """Writes the likely pairs among documents that share a hash in a band."""
    path = _band_file(folder, band)
    if not path.exists():
        keys = corpus.column("bands", band)[numbers]
        order = np.argsort(keys)
        pair_filter = PairFilter(
            partial(corpus.take, "signatures"), corpus.num_new, min_matches(config)
        )
        pairs = likely_pairs(pair_filter, Buckets(numbers[order], *runs(keys[order])))
        aside = path.with_suffix(".tmp.npy")
        np.save(aside, np.stack(pairs))  # half of the time of npz, for little files
        aside.replace(path)
    progress(1)


def likely_pairs(pair_filter: PairFilter, buckets: Buckets) -> Pairs:
    """Returns the pairs within buckets whose signatures pass the filter."""
    numbers, begins, sizes = buckets
    parts = [_empty(), *(_likely(pair_filter, *chunk) for chunk in _small_buckets(buckets))]
    large = sizes > ALL_PAIRS
    for start, size in zip(begins[large], sizes[large], strict=True):
        parts.append(_large_bucket(pair_filter, numbers[start : start + size]))
    return Pairs(*map(np.concatenate, zip(*parts, strict=True)))


def _small_buckets(buckets: Buckets) -> Iterator[tuple[Array, Array]]:
    """Yields all pairs (first, second) of the buckets of at most ALL_PAIRS, in bounded chunks."""
    numbers, begins, sizes = buckets
    for size in np.unique(sizes[(sizes > 1) & (sizes <= ALL_PAIRS)]).tolist():
        starts = begins[sizes == size]
        left, right = np.triu_indices(size, 1)
        step = max(1, FILTERED // len(left))
        for start in range(0, len(starts), step):
            rows = starts[start : start + step, None] + np.arange(size)
            members = np.sort(numbers[rows], axis=1)
            yield members[:, left].ravel(), members[:, right].ravel()


def _likely(pair_filter: PairFilter, first: Array, second: Array) -> Pairs:
    """Selects the pairs whose signatures pass the filter; none of two old documents."""
    new = first < pair_filter.num_new
    first, second = first[new], second[new]
    if not first.size:
        return _empty()
    same = pair_filter.signatures(first) == pair_filter.signatures(second)
    matches = np.count_nonzero(same, axis=1)
    likely = matches >= pair_filter.least
    return Pairs(first[likely], second[likely], matches[likely])


def _large_bucket(pair_filter: PairFilter, members: Array) -> Pairs:
    """Pairs documents of a large bucket: equal signatures with the first of them, unequal ones with
    the most similar of a window."""
    members = np.sort(members)
    signatures = pair_filter.signatures(members)
    rows, firsts, inverse = np.unique(signatures, axis=0, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    repeated = np.flatnonzero(firsts[inverse] != np.arange(len(members)))
    equal = members[firsts[inverse[repeated]]], members[repeated]
    parts = [Pairs(*equal, np.full(len(repeated), signatures.shape[1]))]
    for start in range(0, len(rows), WINDOW):
        window = rows[start : start + WINDOW]
        parts.append(
            _window_pairs(window, members[firsts[start : start + WINDOW]], pair_filter.least)
        )
    pairs = Pairs(*map(np.concatenate, zip(*parts, strict=True)))
    first, second = np.minimum(pairs[0], pairs[1]), np.maximum(pairs[0], pairs[1])
    new = first < pair_filter.num_new
    return Pairs(first[new], second[new], pairs.matches[new])


def _window_pairs(signatures: Array, members: Array, least: int) -> Pairs:
    """Pairs each document of a window with the MOST_PARTNERS most similar ones before it."""
    parts = [_empty()]
    for row in range(1, len(members)):
        matches = np.count_nonzero(signatures[:row] == signatures[row], axis=1)
        best = np.argsort(-matches, kind="stable")[:MOST_PARTNERS]
        best = best[matches[best] >= least]
        parts.append(Pairs(members[best], np.full(len(best), members[row]), matches[best]))
    return Pairs(*map(np.concatenate, zip(*parts, strict=True)))


def _empty() -> Pairs:
    return Pairs(*(np.zeros(0, np.int64) for _ in range(3)))


def _band_file(folder: Path, band: int) -> Path:
    return folder / f"band-{band:04d}.npy"


def unique_pairs(parts: Sequence[Pairs]) -> Pairs:
    """Merges pairs without repetitions, the most similar first."""
    first, second, matches = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((second, first, -matches))
    first, second, matches = first[order], second[order], matches[order]
    once = changes(first) | changes(second)
    return Pairs(first[once], second[once], matches[once])


def verify_pairs(
    corpus: Corpus, size: int, pairs: list[tuple[int, int]], progress: Progress
) -> list[float]:
    """Computes the Jaccard similarity of each pair's texts, as sets of shingles."""
    from mtcli.core.curate.shingles import shingle_set

    sets: dict[int, Array] = {}
    similarities = []
    for pair in pairs:
        for number in pair:
            if number not in sets:
                sets[number] = shingle_set(corpus.text(number), size)
        similarities.append(jaccard(sets[pair[0]], sets[pair[1]]))
    progress(1)
    return similarities


def _verified(run: Map, verify: Callable[..., list[float]], pairs: list[Numbers]) -> list[float]:
    chunks = [pairs[start : start + CHUNK] for start in range(0, len(pairs), CHUNK)]
    verified: list[float] = []
    for similarities in run(verify, chunks, len(chunks), "fuzzy: verify"):
        verified += similarities
    return verified


def _jaccards(
    removals: Removals,
    jaccard_of: dict[Numbers, float],
    verify: Callable[[list[Numbers]], list[float]],
) -> Array:
    """Returns the similarity of each removed document with the one that stays."""
    pairs = [
        (min(pair), max(pair))
        for pair in zip(removals.removed.tolist(), removals.kept.tolist(), strict=True)
    ]
    missing = sorted({pair for pair in pairs if pair not in jaccard_of})
    jaccard_of = jaccard_of | dict(zip(missing, verify(missing), strict=True))
    return np.array([jaccard_of[pair] for pair in pairs])


class Components:
    """A union-find over document numbers; the smallest number of a component is its root."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def root(self, number: int) -> int:
        """Finds the smallest number of a document's component."""
        parents = self._parents
        root = number
        while (above := parents.get(root, root)) != root:
            root = above
        while number != root:
            parents[number], number = root, parents[number]
        return root

    def differ(self, one: int, other: int) -> bool:
        """Says whether two documents are in different components."""
        return self.root(one) != self.root(other)

    def join(self, one: int, other: int) -> None:
        """Joins two components."""
        low, high = sorted((self.root(one), self.root(other)))
        self._parents[high] = low
        self._parents.setdefault(low, low)

    def clusters(self) -> list[Array]:
        """Returns the components of at least two documents, each ascending, by their smallest."""
        clusters: dict[int, list[int]] = defaultdict(list)
        for number in sorted(self._parents):
            clusters[self.root(number)].append(number)
        return [np.array(clusters[root], np.int64) for root in sorted(clusters)]
