"""The matrices that Muon orthogonalises, each on its own, and which rank works on each.

A fused weight holds several: query, key and value, gate and up, and one of each per expert. They
are boxes of the global tensor, so every layout has the same. The ranks that hold parts of a matrix,
or copies, have one owner of it among them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod, sqrt
from typing import NamedTuple

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Box, Matrix, Parameter, intersection, rows_of_rank

OF_HEADS = ("query", "key", "value")  # roles whose rows are those of heads


class MatrixStack(NamedTuple):
    """Matrices [rows, columns] of equal shape that fill a box of a parameter, one after another.

    A stack of several is divided along the box's first dimension.
    """

    name: str  # of the parameter
    box: Box
    rows: int
    columns: int

    @property
    def num_matrices(self) -> int:
        """The number of matrices."""
        return prod(self.box.size) // (self.rows * self.columns)

    @property
    def flops(self) -> int:
        """FLOPs of one iteration of Newton-Schulz: X X^T, its square, and the product with X."""
        short, long = sorted((self.rows, self.columns))
        return self.num_matrices * (4 * short * short * long + 2 * short**3)

    def parts(self, most: int) -> Iterator["MatrixStack"]:
        """Divides the stack into at most `most` parts of whole matrices."""
        (start, *starts), (length, *sizes) = self.box
        share = -(-length // min(most, length)) if self.num_matrices > 1 else length
        for first in range(0, length, share):
            size = (min(share, length - first), *sizes)
            yield self._replace(box=Box((start + first, *starts), size))


class SharedBox(NamedTuple):
    """A box of a stack, and the ranks that have it, as indices of an axis."""

    box: Box
    holders: tuple[int, ...]

    def sender(self, owner: int) -> int:
        """The holder that sends the chunk to the owner: the nearest."""
        return min(self.holders, key=lambda index: abs(index - owner))


def matrix_stacks(parameter: Parameter, box: Box, split_heads: bool) -> Iterator[MatrixStack]:
    """Yields the matrices of a parameter inside `box`: all of it, or all of some experts.

    A of a low-rank adapter is one matrix, and B another.
    """
    for matrix in parameter.matrices or (Matrix("output"),):
        start, size = list(box.start), list(box.size)
        if matrix.dim is not None:
            start[matrix.dim], size[matrix.dim] = matrix.first, matrix.num_slots
        stacked = size[:1] if parameter.is_expert else []
        if split_heads and matrix.role in OF_HEADS:
            stacked = size[:-2]
        rows = prod(size[len(stacked) : -1])
        yield MatrixStack(parameter.name, Box(tuple(start), tuple(size)), rows, size[-1])


def chunks(stack: MatrixStack, boxes_of_ranks: Mapping[Box, tuple[int, ...]]) -> list[SharedBox]:
    """The chunks of a stack in the boxes that ranks hold of its parameter."""
    shared = ((intersection(box, stack.box), holders) for box, holders in boxes_of_ranks.items())
    return [SharedBox(box, holders) for box, holders in shared if box]


@cache
def boxes_of_ranks(
    parameter: Parameter, layout: ParallelLayout, ranks: tuple[int, ...], owners: tuple[str, ...]
) -> dict[Box, tuple[int, ...]]:
    """The boxes of a parameter that some ranks have, each with the indices of those ranks; axes
    `owners` shard its rows."""
    found: dict[Box, tuple[int, ...]] = {}
    for index, rank in enumerate(ranks):
        rows = rows_of_rank(parameter, layout, rank, owners)
        for _, box in parameter.row_boxes(layout, rank, rows):
            found[box] = (*found.get(box, ()), index)
    return found


def assigned(
    chunks_of: Mapping[MatrixStack, Sequence[SharedBox]], size: int
) -> list[list[MatrixStack]]:
    """Each of `size` owners' stacks, balanced by FLOPs: the largest first, each to the owner with
    the least work, and of several to the one that holds the most of it."""
    owned: list[list[MatrixStack]] = [[] for _ in range(size)]
    work = [0] * size
    for stack in sorted(chunks_of, key=lambda stack: -stack.flops):
        least = min(work)
        elements_here = [0] * size
        for box, holders in chunks_of[stack]:
            for index in holders:
                elements_here[index] += prod(box.size)
        idle = (index for index in range(size) if work[index] == least)
        owner = max(idle, key=lambda index: elements_here[index])
        owned[owner].append(stack)
        work[owner] += stack.flops
    return owned


def step_scale(rows: int, columns: int, scale: str) -> float:
    """The factor of an orthogonalised step of a matrix.

    With "match_adamw" its root mean square is about AdamW's (arXiv:2502.16982, section 2.2); with
    "spectral" the factor is torch.optim.Muon's own.
    """
    if scale == "spectral":
        return sqrt(max(1.0, rows / columns))
    return 0.2 * sqrt(max(rows, columns))
