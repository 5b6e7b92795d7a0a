"""Exact duplicates: documents of one text, told by 128 bits of its hash."""

import numpy as np
import xxhash

from mtcli.core.curate.batch import Batch
from mtcli.core.curate.documents import Document
from mtcli.core.curate.hashing import Array


def text_hashes(documents: list[Document], _: Batch) -> dict[str, Array]:
    """The xxh3-128 hash of each text, as two words: {"text_hash": uint64 [documents, 2]}."""
    digests = [
        xxhash.xxh3_128_digest(document.text.encode("utf-8", "surrogatepass"))
        for document in documents
    ]
    return {"text_hash": np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)}


def same_texts(hashes: Array) -> Array:
    """Groups equal rows: the number of each row's group, which is its first row [rows]."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable
    ordered = hashes[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    firsts = order[begins]  # the smallest row of each group
    groups = np.empty(len(order), np.int64)
    groups[order] = np.repeat(firsts, np.diff(np.append(np.flatnonzero(begins), len(order))))
    return groups
