"""Gathers each matrix whole on one owner among the ranks that hold parts of it, and sends a result
back to all of them.

An owner's matrices pass in rounds: while it works on one round, the next arrives and the last one's
results are on their way.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.core.mesh.matrices import (
    MatrixStack,
    SharedBox,
    assigned,
    boxes_of_ranks,
    chunks,
    matrix_stacks,
)
from mtcli.core.mesh.sharding import Box, intersection
from mtcli.core.parallel.collectives import start_all_to_all_v
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.ownership import Ownership

ROUND = 2**20  # elements of an owner's matrices in a round, or one part of a stack

Tensors = Mapping[str, Tensor]  # a rank's rows by parameter
Shape = tuple[int, int]  # of a matrix
Stacks = dict[Shape, Tensor]  # the matrices of a round by shape: [S, rows, columns]
MatrixUpdate = Generator[Stacks, Stacks | None, None]  # is sent a result for each stack


class Location(NamedTuple):
    """Where a chunk is: a box of some rows of a tensor, by the tensor's key."""

    key: str | Shape
    rows: slice
    size: tuple[int, ...]  # of the rows, without padding columns
    inside: tuple[slice, ...]

    def view(self, tensors: Mapping[Any, Tensor]) -> Tensor:
        """The chunk."""
        return tensors[self.key][self.rows][..., : self.size[-1]].view(self.size)[self.inside]


class Transfers:
    """The chunks that pass in one direction of a round, of which this rank has one end or both."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.sent: list[list[Location]] = [[] for _ in axis.ranks]
        self.received: list[list[Location]] = [[] for _ in axis.ranks]
        self.kept: list[tuple[Location, Location]] = []

    def add(
        self, source: int, target: int, at_source: Location | None, at_target: Location | None
    ) -> None:
        """Adds a chunk that passes from one rank to another; locations on other ranks are None."""
        if source == target == self.axis.rank:
            assert at_source and at_target
            self.kept.append((at_source, at_target))
        elif source == self.axis.rank and at_source:
            self.sent[target].append(at_source)
        elif target == self.axis.rank and at_target:
            self.received[source].append(at_target)


class Round(NamedTuple):
    """The matrices that owners work on at a time: this rank's by shape, and what passes there and
    back."""

    counts: dict[Shape, int]
    gather: Transfers
    scatter: Transfers


class Passing:
    """Chunks under way from tensors to tensors, by the locations of `transfers`."""

    def __init__(
        self,
        transfers: Transfers,
        sources: Mapping[Any, Tensor],
        targets: Mapping[Any, Tensor],
        like: Tensor,
    ) -> None:
        """`like` has the dtype of what is sent, and the device."""
        kept_from = [source.view(sources) for source, _ in transfers.kept]
        _copy([target.view(targets) for _, target in transfers.kept], kept_from)
        leaving = [[x.view(sources) for x in of_rank] for of_rank in transfers.sent]
        arriving = [[x.view(targets) for x in of_rank] for of_rank in transfers.received]
        sent, received = (
            [sum(x.numel() for x in views) for views in by_rank] for by_rank in (leaving, arriving)
        )
        self.sent, self.received = like.new_empty(sum(sent)), like.new_empty(sum(received))
        self.targets, views = list(chain(*arriving)), list(chain(*leaving))
        _copy(_parts(self.sent, views), views)
        axis = transfers.axis
        self.work = start_all_to_all_v(self.received, self.sent, received, sent, axis)

    def wait(self) -> None:
        """Waits until this rank has what it receives."""
        self.work.wait()
        _copy(self.targets, _parts(self.received, self.targets))


class MatrixExchange:
    """The matrices of some parameters, of which the ranks of an axis hold parts or copies."""

    def __init__(
        self, names: Iterable[str], ownership: Ownership, axis: Axis, split_heads: bool
    ) -> None:
        """`names` are the same on all ranks of the axis."""
        self.axis = axis
        layout, rank = ownership.groups.layout, ownership.groups.rank
        self.blocks: dict[str, list[tuple[slice, Box]]] = {}
        self.chunks: dict[MatrixStack, list[SharedBox]] = {}
        self.local: list[tuple[Location, Shape]] = []  # this rank's parts of matrices
        for name in names:
            parameter = ownership.table[name]
            self.blocks[name] = list(parameter.row_boxes(layout, rank, ownership.rows(name)))
            alike = replace(parameter, name="", layer=0)  # a block's has the boxes of another's
            boxes = boxes_of_ranks(alike, layout, axis.ranks, ownership.owner_axes(name))
            shared = Box.of(parameter.shape)
            if parameter.is_expert:  # those of this rank, whole
                (first, *_), (count, *_) = parameter.box(layout, rank)
                shared = Box((first, *shared.start[1:]), (count, *shared.size[1:]))
            for stack in matrix_stacks(parameter, shared, split_heads):
                for part in stack.parts(axis.size):
                    self.chunks[part] = chunks(part, boxes)
                    self.local += [
                        (self._local(name, chunk.box), (stack.rows, stack.columns))
                        for chunk in self.chunks[part]
                        if axis.rank in chunk.holders
                    ]
        owned = [_in_rounds(stacks) for stacks in assigned(self.chunks, axis.size)]
        numbers = range(max(map(len, owned)))
        self.rounds = [self._round([rounds[n : n + 1] for rounds in owned]) for n in numbers]

    def stacks(self, sources: Tensors, targets: Tensors, like: Tensor) -> MatrixUpdate:
        """Yields this rank's matrices in `sources`, round by round, and writes what it is sent for
        them to `targets`, on all ranks. Collective.

        `like` has the dtype in which matrices pass, and the device.
        """
        gathers = (self._gather(number, sources, like) for number in self.rounds)
        ahead = pairwise(chain(gathers, [None]))  # which begins the next before it yields one
        scatter: Passing | None = None
        for number, (gather, _) in zip(self.rounds, ahead, strict=True):
            assert gather is not None, "a round each"
            stacks, passing = gather
            passing.wait()
            results = yield stacks
            assert results is not None, "a result for each stack"
            if scatter is not None:
                scatter.wait()
            scatter = Passing(number.scatter, results, targets, like)
            del gather, stacks, passing, results  # of which the next round has its own
        if scatter is not None:
            scatter.wait()

    def _gather(self, number: Round, sources: Tensors, like: Tensor) -> tuple[Stacks, Passing]:
        """Starts a round: the stacks of this rank's matrices, and what arrives in them."""
        stacks = {shape: like.new_empty(n, *shape) for shape, n in number.counts.items()}
        return stacks, Passing(number.gather, sources, stacks, like)

    def _round(self, owned: Sequence[Sequence[Sequence[MatrixStack]]]) -> Round:
        """The round in which each owner has some stacks, or none."""
        me = self.axis.rank
        counts: dict[Shape, int] = {}
        gather, scatter = Transfers(self.axis), Transfers(self.axis)
        for owner, stacks in enumerate(map(chain.from_iterable, owned)):
            for stack in stacks:
                shape, first = (stack.rows, stack.columns), 0
                if owner == me:
                    first = counts.get(shape, 0)
                    counts[shape] = first + stack.num_matrices
                rows = slice(first, first + stack.num_matrices)
                for chunk in self.chunks[stack]:
                    box = chunk.box
                    inside = Location(shape, rows, stack.box.size, _relative(box, stack.box))
                    local = self._local(stack.name, box) if me in chunk.holders else None
                    gather.add(chunk.sender(owner), owner, local, inside)
                    for holder in chunk.holders:
                        scatter.add(owner, holder, inside, local)
        return Round(counts, gather, scatter)

    def _local(self, name: str, box: Box) -> Location:
        """Where this rank has a chunk of a parameter."""
        for rows, block in self.blocks[name]:
            if intersection(block, box) == box:
                return Location(name, rows, block.size, _relative(box, block))
        raise AssertionError(f"{name} has {box} here")


def _in_rounds(stacks: Iterable[MatrixStack]) -> list[list[MatrixStack]]:
    """Divides an owner's stacks into rounds, those of a shape together."""
    rounds: list[list[MatrixStack]] = []
    left = 0
    for stack in sorted(stacks, key=lambda stack: (stack.rows, stack.columns)):
        size = prod(stack.box.size)
        if size > left or not rounds:
            rounds.append([])
            left = ROUND
        rounds[-1].append(stack)
        left -= size
    return rounds


def _relative(box: Box, outer: Box) -> tuple[slice, ...]:
    """A box as an index into a box around it."""
    return box.moved(tuple(-start for start in outer.start)).slices


def _parts(buffer: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a buffer, one after another, of the views' shapes."""
    parts = buffer.split([x.numel() for x in views])
    return [part.view(x.shape) for part, x in zip(parts, views, strict=True)]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # torch takes no empty list
        torch._foreach_copy_(targets, sources)
