"""Connected components of edges that lie on many machines: rounds of minimum labels.

Alternating large-star and small-star (Kiveris et al. 2014, "Connected Components in MapReduce and
Beyond", section 3): each step sends an edge's end to the smallest neighbour of the other, and the
edges end as stars round the smallest number of each component after O(log^2 n) rounds. Edges are
int64 [edges, 2]; a step is given all edges of the documents that it has.
"""

import numpy as np

from mtcli.core.curate.hashing import MULTIPLIER, Array, changes, mix, runs


def both_ways(edges: Array) -> Array:
    """Each edge from both of its ends, as `large_star` takes them."""
    return np.concatenate([edges, edges[:, ::-1]])


def downwards(edges: Array) -> Array:
    """Each edge from its larger end, as `small_star` takes them."""
    return np.sort(edges, axis=1)[:, ::-1]


def large_star(edges: Array) -> Array:
    """Joins the larger neighbours of each document with the smallest of it and its neighbours."""
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
    """Sorts edges and leaves out repetitions."""
    ordered = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
    distinct: Array = ordered[changes(ordered)]
    return distinct


def checksum(edges: Array) -> int:
    """A number that edges in any order, on any machines, add up to (modulo 2^64)."""
    one, other = edges.astype(np.uint64).T
    return int(mix(mix(one) * MULTIPLIER + other).sum(dtype=np.uint64))


def _smallest(edges: Array) -> tuple[Array, Array, Array]:
    """Edges by their first end, and the smallest of its neighbours [edges] each."""
    source, target = once(edges).T
    begins, sizes = runs(source)
    return source, target, np.repeat(target[begins], sizes)
