"""Finds exact duplicates: documents whose texts have the same 128-bit hash."""

import numpy as np
import xxhash

from mtcli.core.curate.batch import Batch
from mtcli.core.curate.corpus import Corpus, Removals
from mtcli.core.curate.documents import Document
from mtcli.core.curate.hashing import Array, runs


def text_hashes(documents: list[Document], _: Batch) -> dict[str, Array]:
    """Hashes each text with xxh3-128, as two words: {"text_hash": uint64 [documents, 2]}."""
    digests = [
        xxhash.xxh3_128_digest(document.text.encode("utf-8", "surrogatepass"))
        for document in documents
    ]
    return {"text_hash": np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)}


def find_same(corpus: Corpus, priority: tuple[str, ...]) -> Removals:
    """Finds exact duplicates among the documents that are alive."""
    numbers = np.flatnonzero(corpus.alive)
    groups = same_texts(corpus.column("text_hash")[numbers].reshape(-1, 2))
    order = np.argsort(groups, kind="stable")
    begins, sizes = runs(groups[order])
    several = zip(begins[sizes > 1], sizes[sizes > 1], strict=True)
    clusters = [numbers[order[start : start + size]] for start, size in several]
    return corpus.removals(clusters, priority)


def same_texts(hashes: Array) -> Array:
    """Groups equal rows; returns the index of each row's first equal row [rows]."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable
    begins, sizes = runs(hashes[order])
    groups = np.empty(len(order), np.int64)
    groups[order] = np.repeat(order[begins], sizes)  # the smallest row of each group
    return groups
