"""Finds connected components of edges that are spread over machines: rounds of minimum labels.

Alternates large-star and small-star (Kiveris et al. 2014, "Connected Components in MapReduce and
Beyond", section 3). A step joins a document's neighbours with the smallest of them; after O(log^2
n) rounds each component is a star round its smallest number. Edges are int64 [edges, 2]; a step
needs all edges of the documents in its partition.
"""

import numpy as np

from mtcli.core.curate.hashing import MULTIPLIER, Array, changes, mix, runs


def both_ways(edges: Array) -> Array:
    """Returns each edge in both directions, as `large_star` takes edges."""
    return np.concatenate([edges, edges[:, ::-1]])


def downwards(edges: Array) -> Array:
    """Returns each edge from its larger end, as `small_star` takes edges."""
    return np.sort(edges, axis=1)[:, ::-1]


def large_star(edges: Array) -> Array:
    """Joins the larger neighbours of each document with the minimum of the document and its
    neighbours."""
    source, target, smallest = _smallest(edges)
    larger = target > source
    least = np.minimum(smallest, source)
    return once(np.stack([target[larger], least[larger]], axis=1))


def small_star(edges: Array) -> Array:
    """Joins each document and its smaller neighbours with the smallest of them."""
    source, target, smallest = _smallest(edges)
    other = target != smallest
    joined = [np.stack([target[other], smallest[other]], axis=1)]
    return once(np.concatenate([*joined, np.stack([source, smallest], axis=1)]))


def once(edges: Array) -> Array:
    """Sorts edges and removes repetitions."""
    ordered = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
    distinct: Array = ordered[changes(ordered)]
    return distinct


def checksum(edges: Array) -> int:
    """Hashes a set of edges by a sum modulo 2^64, which adds up over machines in any order."""
    one, other = edges.astype(np.uint64).T
    return int(mix(mix(one) * MULTIPLIER + other).sum(dtype=np.uint64))


def _smallest(edges: Array) -> tuple[Array, Array, Array]:
    """Sorts edges by their first end; returns both ends and the first end's smallest neighbour,
    [edges] each."""
    source, target = once(edges).T
    begins, sizes = runs(source)
    return source, target, np.repeat(target[begins], sizes)
