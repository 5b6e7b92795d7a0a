"""A chunk of a tensor as rectangles of the same tensor with its dimensions split into factors."""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from mtcli.core.spec.errors import wrong
from mtcli.core.spec.sharding import Rectangle, consecutive

Factors = tuple[tuple[int, ...], ...]  # of each dimension


class Subblock(NamedTuple):
    """Consecutive elements of a chunk, from `first` on: a rectangle of the split tensor."""

    first: int
    start: tuple[int, ...]
    size: tuple[int, ...]


def subblocks(box: Rectangle, lead: tuple[int, ...], inner: Factors) -> Iterator[Subblock]:
    """The rectangles that a chunk holds of the part of a tensor at the indices `lead`, whose other
    dimensions are products of `inner`; none where the chunk has nothing of it.

    Raises MtcliError where the chunk's elements of a rectangle are not consecutive.
    """
    first = 0
    for dim, index in enumerate(lead):
        at = index - box.start[dim]
        if not 0 <= at < box.size[dim]:
            return
        first += at * prod(box.size[dim + 1 :])
    starts, sizes = box.start[len(lead) :], box.size[len(lead) :]
    cuts = [
        list(consecutive(dims, start, start + size))
        for dims, start, size in zip(inner, starts, sizes, strict=True)
    ]
    for dim, parts in enumerate(cuts):
        if len(parts) > 1 and prod(sizes[:dim]) > 1:
            raise wrong(f"a chunk of {list(box.size)} at {list(box.start)} cuts heads apart")
    for choice in product(*cuts):
        corner = [_flat(start, dims) for (start, _), dims in zip(choice, inner, strict=True)]
        skipped = sum(
            (at - start) * prod(sizes[dim + 1 :])
            for dim, (at, start) in enumerate(zip(corner, starts, strict=True))
        )
        yield Subblock(
            first + skipped,
            tuple(n for start, _ in choice for n in start),
            tuple(n for _, size in choice for n in size),
        )


def _flat(index: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    flat = 0
    for at, size in zip(index, sizes, strict=True):
        flat = flat * size + at
    return flat
