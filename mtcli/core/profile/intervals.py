"""Unions, intersections and differences of time intervals."""

from collections.abc import Iterable
from math import inf

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges points into disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The points that two lists of disjoint ordered intervals share."""
    shared, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            shared.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The points of `a` that are not in `b`; both are disjoint and in order."""
    edges = [-inf, *(edge for interval in b for edge in interval), inf]
    return common(a, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
