"""Computes MinHash signatures of documents (Broder 1997), by a sketch with one hash per shingle,
and the bands by which near duplicates are found.

A band is a hash of a few signature values: two documents whose shingles have Jaccard similarity J
share a band with probability 1 - (1 - J^rows)^bands. Of each value the lowest 8 bits are stored
(b-bit minwise hashing, Li and König 2010): enough to tell a likely pair from a chance one before
any text is read.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from mtcli.core.curate.batch import Batch
from mtcli.core.curate.config import FuzzyConfig
from mtcli.core.curate.documents import Document
from mtcli.core.curate.hashing import SECOND, Array, mix

RECALL = 0.995  # of pairs at the threshold, at least


def bands_of(config: FuzzyConfig) -> tuple[int, int]:
    """Chooses (bands, rows in each): the longest rows whose recall at the threshold is RECALL."""
    for rows in range(config.hashes, 1, -1):
        bands = config.hashes // rows
        if 1 - (1 - config.threshold**rows) ** bands >= RECALL:
            return bands, rows
    return config.hashes, 1


def make_signatures(config: FuzzyConfig) -> Callable[[list[Document], Batch], dict[str, Array]]:
    """Builds the feature of `fuzzy`: `signatures` uint8 [documents, hashes] and `bands` uint64
    [documents, bands]."""
    signatures = partial(_signatures, config, *bands_of(config))
    for text in ("warm", "\U0001f525"):  # loads the loops before workers fork
        signatures([Document(b"", "", text, 4)], Batch([]))
    return signatures


def _signatures(
    config: FuzzyConfig, bands: int, rows: int, documents: list[Document], _: Batch
) -> dict[str, Array]:
    from mtcli.core.curate.shingles import signatures

    minhashes = signatures([document.text for document in documents], config.shingle, config.hashes)
    return {
        "signatures": minhashes.astype(np.uint8),
        "bands": _band_hashes(minhashes[:, : bands * rows].reshape(-1, bands, rows)),
    }


def _band_hashes(values: Array) -> Array:
    """Hashes [documents, bands, rows] along the last axis."""
    total = np.zeros(values.shape[:2], np.uint64)
    for row in range(values.shape[2]):
        total *= SECOND
        total += values[:, :, row]
    return mix(total)
