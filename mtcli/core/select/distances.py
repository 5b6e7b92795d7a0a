"""Computes distances between proxies in blocks: similarities, and each point's nearest choice.

The similarity of i and j is D - |g_i - g_j|, where D is the sum of the two largest distances from
the mean, so that none is negative. Then F(S) = n D - L(S), where L(S) is the sum of every point's
distance to its nearest one in S: CRAIG's objective (arXiv:1906.01827, section 3). L(S) bounds the
error of S: |sum of g_i - sum over j in S of gamma_j g_j| <= L(S), for gamma_j points nearest to j.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.select.facility_location import MatrixSimilarities, Similarities

# Distances made at a time: in a CPU's cache, and enough for a GPU.
BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}
ROWS = 1 << 16  # that are copied at a time
SAME = 1e-12  # squared distances below this part of the squared norms are rounding


class Points:
    """Proxies around their mean [n, d]; computes their distances in blocks of rows."""

    def __init__(self, proxies: Tensor) -> None:
        n, d = proxies.shape
        mean = proxies.mean(0, dtype=torch.float64).to(proxies.dtype)
        # One GEMM makes squared distances: [-2 x, |x|^2, 1] [y, 1, |y|^2]^T.
        self.left, self.right = proxies.new_ones(n, d + 2), proxies.new_ones(n, d + 2)
        blocks = (x.split(ROWS) for x in (self.left, self.right, proxies))
        for left, right, some in zip(*blocks, strict=True):
            centred = some - mean
            right[:, :d], left[:, :d] = centred, -2.0 * centred
            left[:, d] = right[:, d + 1] = centred.square().sum(1)
        self.squares = self.left[:, d].clone()
        self._memory: dict[str, Tensor] = {}
        radii = self.squares.sqrt().topk(min(2, len(proxies))).values
        self.reach = float(radii.double().sum())

    def __len__(self) -> int:
        return len(self.left)

    @property
    def block(self) -> int:
        """Rows of distances to all points that are made at a time."""
        return max(1, BLOCK[self.left.device.type] // len(self))

    def distances(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        """Computes the distances of points [b] to columns [c], or to all [n].

        The next call overwrites the result: freeing such blocks among small results would fragment
        the heap.
        """
        right = self.right if columns is None else self.right[columns]
        column_squares = self.squares if columns is None else self.squares[columns]
        shape = len(rows), len(column_squares)
        squared = torch.mm(self.left[rows], right.T, out=self._kept("squared", shape))
        least = self._kept("least", shape)
        torch.add(self.squares[rows][:, None], column_squares, out=least).mul_(SAME)
        same = torch.le(squared, least, out=self._kept("same", shape, torch.bool))
        return squared.masked_fill_(same, 0.0).sqrt_()

    def _kept(self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        """A view of a named buffer, which grows to the largest shape."""
        size = shape[0] * shape[1]
        if name not in self._memory or len(self._memory[name]) < size:
            dtype = dtype or self.left.dtype
            self._memory[name] = torch.empty(size, dtype=dtype, device=self.left.device)
        return self._memory[name][:size].view(shape)


class BlockSimilarities:
    """Similarities that are computed on demand, a few rows at a time."""

    def __init__(self, points: Points, reach: float) -> None:
        self.points, self.reach = points, reach
        self.size, self.block = len(points), points.block

    def rows(self, candidates: Tensor) -> Tensor:
        """Computes the similarities of all points to some candidates [b, n]."""
        return self.points.distances(candidates).neg_().add_(self.reach)


def similarities(points: Points, reach: float, in_memory: bool) -> Similarities:
    """The similarities of all points: `in_memory`, rounded to float32, or in blocks."""
    blocks = BlockSimilarities(points, reach)
    if not in_memory:
        return blocks
    size, device = len(points), points.left.device
    matrix = torch.empty(size, size, dtype=torch.float32, device=device)
    for some in torch.arange(size, device=device).split(blocks.block):
        matrix[some] = blocks.rows(some).float()
    return MatrixSimilarities(matrix, blocks.block)


class Nearest(NamedTuple):
    """The nearest chosen point of each point, as its place among them, and its distance."""

    place: Tensor  # int64 [n]
    distance: Tensor  # [n]


def nearest(points: Points, chosen: Tensor, advance: Callable[[int], object]) -> Nearest:
    """Finds the nearest chosen point [r] of each point; a chosen one is its own nearest.

    `advance` gets the number of points done.
    """
    size, device = len(points), points.left.device
    assigned = torch.empty(size, dtype=torch.int64, device=device)
    distance = torch.empty(size, dtype=points.left.dtype, device=device)
    rows = max(1, BLOCK[device.type] // len(chosen))
    for some in torch.arange(size, device=device).split(rows):
        distance[some], assigned[some] = points.distances(some, chosen).min(1)
        advance(len(some))
    assigned[chosen] = torch.arange(len(chosen), device=device)
    distance[chosen] = 0.0
    return Nearest(assigned, distance)
