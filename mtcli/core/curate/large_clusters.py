"""Finds clusters of near duplicates that hold most of a source's documents.

Users rarely want to remove those: texts of one form, such as tables of numbers or code under one
licence, can share shingles without being copies.
"""

from collections import Counter
from typing import Any

import numpy as np

from mtcli.core.curate.corpus import Corpus, Removals
from mtcli.core.curate.documents import id_of
from mtcli.core.curate.hashing import Array

FEWEST = 10  # documents of a source that is looked at


def large_clusters(corpus: Corpus, entered: Array, removals: Removals) -> list[dict[str, Any]]:
    """Lists the sources, by name, with more than half of their documents in one cluster.

    `documents` counts the source's documents that `entered` (bool [documents]) selects, `clustered`
    those in the cluster; `kept_id` is the id of the document that stays.
    """
    totals = _totals(corpus, entered)
    kept_rows, sizes = np.unique(removals.kept, return_counts=True)
    kept_rows = kept_rows[sizes >= FEWEST // 2]
    copies = removals.rows(np.isin(removals.kept, kept_rows))
    stay = kept_rows[kept_rows < corpus.num_new]
    numbers = np.concatenate([copies.removed, stay])
    clusters = np.concatenate([copies.kept, stay])
    counts = Counter(zip(corpus.sources(numbers), clusters.tolist(), strict=True))
    return [
        {
            "source": source,
            "documents": totals[source],
            "clustered": count,
            "kept_id": id_of(*corpus.keys(np.array([number]))),
        }
        for (source, number), count in sorted(counts.items())
        if totals[source] >= FEWEST and 2 * count > totals[source]
    ]


def _totals(corpus: Corpus, entered: Array) -> Counter[str]:
    """Counts each source's documents that entered, without those of an older corpus."""
    totals: Counter[str] = Counter()
    for part, alive, first in corpus.new_slices().values():
        names, source_of = part.summary["sources"], part.array("sources")
        counts = np.bincount(source_of[entered[first : first + len(alive)]], minlength=len(names))
        totals.update(dict(zip(names, counts.tolist(), strict=True)))
    return totals
