"""Describes how a parameter is sharded over ranks.

Initialisation, gradient reduction, the gradient norm, checkpoints and predicted memory all read it.
It is stored by canonical name, never on an nn.Parameter, whose attributes are lost in to_empty(),
load_state_dict(assign=True) and deepcopy.

A rank's box of a parameter is stored as a matrix (Parameter.stored_shape). With zero 1 and 3 its
rows are sharded again, over the ranks with the same box and different data: rank i of n owners has
rows [i * r, (i + 1) * r) with r = ceil(rows / n), the last ranks fewer or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal, NamedTuple

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.layout import ParallelLayout

VOCAB_MULTIPLE = 128  # rows of a vocabulary shard: tensor cores want multiples of 64 to 128
BOX_BYTES = 32 << 20  # memory of one box, where a tensor is processed box by box
LARGE_ELEMENTS = 2**21  # in 16 bits 4 MiB, whose copies take as long as a collective's start

Role = Literal["query", "key", "value", "latent", "output", "gate", "up", "down"]
# "normal_vector" has the values of "normal" without being a matrix: no GEMM, and no weight decay
Init = Literal["normal", "normal_vector", "residual", "adapter", "ones", "zeros"]
Layer = int | Literal["first", "last"]  # the number of a block, or an end of the pipeline


class Box(NamedTuple):
    """A box of a global tensor: its start and size in each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "Box":
        """The box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    def moved(self, by: tuple[int, ...]) -> "Box":
        """The box of the same size with its start moved by `by`."""
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    @property
    def inside(self) -> tuple[slice, ...]:
        """The box as an index into a rank's local tensor, whose other elements are padding."""
        return tuple(slice(n) for n in self.size)


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes of one tensor, or None."""
    start = tuple(map(max, a.start, b.start))
    ends = [min(p + n, q + m) for p, n, q, m in zip(a.start, a.size, b.start, b.size, strict=True)]
    size = tuple(end - at for end, at in zip(ends, start, strict=True))
    return Box(start, size) if all(n > 0 for n in size) else None


def boxes_of_at_most(size: tuple[int, ...], most: int) -> Iterator[Box]:
    """Splits a tensor into boxes of at most `most` elements, in row-major order within and between
    boxes; none for an empty tensor."""
    if prod(size) <= most or not size:
        if prod(size):
            yield Box.of(size)
        return
    rows = most // prod(size[1:])
    for first in range(0, size[0], max(1, rows)):
        if rows:
            count = min(rows, size[0] - first)
            yield Box((first, *(0 for _ in size[1:])), (count, *size[1:]))
        else:
            for start, inner in boxes_of_at_most(size[1:], most):
                yield Box((first, *start), (1, *inner))


def boxes_of_range(shape: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """The boxes of the elements first .. end - 1 of an array, in row-major order."""
    if first >= end:
        return
    if len(shape) == 1:
        yield Box((first,), (end - first,))
        return
    inner = prod(shape[1:])
    row, column = divmod(first, inner)
    if column or end - first < inner:  # some of one row, then the rest
        stop = min(end, (row + 1) * inner)
        for start, size in boxes_of_range(shape[1:], column, stop - row * inner):
            yield Box((row, *start), (1, *size))
        yield from boxes_of_range(shape, stop, end)
        return
    rows = (end - first) // inner
    yield Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
    yield from boxes_of_range(shape, first + rows * inner, end)


def flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The row-major number of an element of an array."""
    flat = 0
    for at, size in zip(index, shape, strict=True):
        flat = flat * size + at
    return flat


class Matrix(NamedTuple):
    """A matrix [.., inputs] inside the weight of a block's linear layer: its role, and its slots of
    dim `dim`, `num_slots` from `first` on; the whole weight where dim is None. Each expert has its
    own."""

    role: Role
    dim: int | None = None
    first: int = 0
    num_slots: int = 1


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, by canonical name; shapes are global and never padded.

    `shard_axes` names, per dimension, the mesh axis that shards it evenly (None: replicated). An
    axis named by two dimensions shards the first as far as it divides that, and the second by the
    rest: 4 ranks of ("tp", None, "tp") with 2 heads have half of the columns of one head each. Axis
    "tp_row" exists where tp ranks form a grid of several rows; "tp_columns", the columns of
    activations, is axis tp in such a grid and None otherwise. `matrices` are those of a block's
    linear layer, several if it is fused; tables, heads, routers and adapters have none. A parameter
    that is not `trained` has no gradient and no optimizer state, and is at least float32 unless it
    is `frozen`.
    """

    name: str
    shape: tuple[int, ...]
    shard_axes: tuple[str | None, ...]
    init: Init
    layer: Layer
    padded: int | None = None  # the dim that is padded to shard evenly: the vocabulary
    trained: bool = True
    tied: bool = False  # the last stage has a second copy
    frozen: bool = False  # a weight that the run leaves as it is
    of_adapter: bool = False  # A or B of a low-rank adapter
    partial_over_tp: bool = False  # if tp replicates it, a rank's gradient is a partial sum
    matrices: tuple[Matrix, ...] = ()

    def axes(self, layout: ParallelLayout) -> tuple[str | None, ...]:
        """The axis of a layout that shards each dimension."""
        columns = "tp" if layout.tp_rows > 1 else None
        return tuple(columns if axis == "tp_columns" else axis for axis in self.shard_axes)

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether it is on the expert grid, with one shard of the experts per ep rank."""
        return "ep" in self.shard_axes

    def local_shape(self, layout: ParallelLayout) -> tuple[int, ...]:
        """The shape of every rank's local tensor, padding included."""
        sizes = zip(self._padded_shape(layout), self._num_shards(layout), strict=True)
        return tuple(-(-size // count) for size, count in sizes)

    def box(self, layout: ParallelLayout, rank: int) -> Box:
        """A rank's box of the global tensor, without padding; it may be empty."""
        coordinates, local = layout.coordinates(rank), self.local_shape(layout)
        start = list[int]()
        dims = zip(self.shape, local, self.axes(layout), self._num_shards(layout), strict=True)
        for size, n, axis, count in reversed(list(dims)):
            index = 0
            if axis:  # neighbours differ in the last dimension that it shards
                coordinates[axis], index = divmod(coordinates[axis], count)
            start.insert(0, min(index * n, size))
        sizes = (min(n, s - a) for n, s, a in zip(local, self.shape, start, strict=True))
        return Box(tuple(start), tuple(sizes))

    def stored_shape(self, layout: ParallelLayout) -> tuple[int, ...]:
        """The shape that every rank allocates: `local_shape` as a matrix [rows, columns], or a
        vector.

        Rows are what data parallel ranks divide; the first dim of [2, ffn, hidden] alone would have
        too few.
        """
        local = self.local_shape(layout)
        return (prod(local[:-1]), local[-1]) if len(local) > 1 else local

    def row_boxes(
        self, layout: ParallelLayout, rank: int, rows: slice
    ) -> Iterator[tuple[slice, Box]]:
        """Yields (rows, box) of the boxes that the stored rows `rows` of a rank fill, with rows
        counted from the first of them. Rows that pad the vocabulary are in no box."""
        start, size = self.box(layout, rank)
        columns = len(size) - 1 if len(size) > 1 else 1  # dimensions before them are rows
        leading = size[:columns]
        for at, extent in boxes_of_range(leading, rows.start, min(rows.stop, prod(leading))):
            first = flat_index(at, leading) - rows.start
            corner = (*(a + b for a, b in zip(start, at, strict=False)), *start[columns:])
            yield slice(first, first + prod(extent)), Box(corner, (*extent, *size[columns:]))

    def replicated_over(self, layout: ParallelLayout) -> tuple[str, ...]:
        """The axes of its grid along which ranks of a replica and stage have the same elements."""
        grid = layout.experts if self.is_expert else layout.attention
        apart = ("replica", "pp", *self.axes(layout))
        return tuple(axis for axis in grid.axes if axis not in apart)

    def is_primary(self, layout: ParallelLayout, rank: int, owners: tuple[str, ...] = ()) -> bool:
        """Whether this rank counts and saves its elements, as the first of its replica's ranks that
        have the same. `owners` are axes that shard the rows again."""
        coordinates = layout.coordinates(rank)
        copies = (axis for axis in self.replicated_over(layout) if axis not in owners)
        return all(coordinates[axis] == 0 for axis in copies)

    def gradient_axes(self, layout: ParallelLayout, sequence_parallel: bool) -> tuple[str, ...]:
        """The axes over which a rank's gradient is a partial sum.

        They include data axes and tp_row, whose ranks have different tokens. If tp replicates the
        parameter, they include tp under sequence parallelism, where a rank has 1/tp of the tokens
        (arXiv:2205.05198, 4.2.2), and always if it is `partial_over_tp`: a rank then uses 1/tp of
        the columns or heads.
        """
        axes = self.replicated_over(layout)
        if sequence_parallel or self.partial_over_tp:
            return axes
        return tuple(axis for axis in axes if axis != "tp")

    def _num_shards(self, layout: ParallelLayout) -> list[int]:
        axes = self.axes(layout)
        left = {axis: layout.size(axis) for axis in axes if axis}
        counts = []
        for dim, (size, axis) in enumerate(zip(self.shape, axes, strict=True)):
            if axis is None:
                counts.append(1)
                continue
            is_last = axis not in axes[dim + 1 :]
            counts.append(left[axis] if is_last else gcd(size, left[axis]))
            left[axis] //= counts[-1]
        return counts

    def _padded_shape(self, layout: ParallelLayout) -> tuple[int, ...]:
        if self.padded is None:
            return self.shape
        axis = self.shard_axes[self.padded]
        multiple = VOCAB_MULTIPLE * (layout.size(axis) if axis else 1)
        rows = -(-self.shape[self.padded] // multiple) * multiple
        return (*self.shape[: self.padded], rows, *self.shape[self.padded + 1 :])


def shards_parameters(zero: int, layout: ParallelLayout, model: ModelConfig) -> bool:
    """Whether parameters are sharded over data ranks: zero = 3, and there are several data
    ranks."""
    of_experts = layout.edp if model.num_experts else 1
    return zero == 3 and max(layout.dp * layout.cp, of_experts) > 1


def owner_axes(
    parameter: Parameter, layout: ParallelLayout, sequence_parallel: bool
) -> tuple[str, ...]:
    """The axes over which zero 1 and 3 shard a parameter: those of its gradient's sum without tp
    and tp_row; none of a router's bias, and only zero 3 shards a frozen one."""
    if not (parameter.trained or parameter.frozen):
        return ()
    summed = parameter.gradient_axes(layout, sequence_parallel)
    return tuple(axis for axis in summed if axis not in ("tp", "tp_row"))


def needs_no_copy(rows: int, elements: int, owners: int) -> bool:
    """Whether owners' updated rows of a parameter are gathered where they lie: all have equally
    many, and it is large enough for a collective of its own."""
    return rows % owners == 0 and elements >= LARGE_ELEMENTS


def owned_rows(rows: int, owner: int, owners: int) -> slice:
    """The rows [first, last) of one of the owners; it may be empty."""
    share = -(-rows // owners)
    first = min(owner * share, rows)
    return slice(first, min(first + share, rows))


def rows_of_rank(
    parameter: Parameter, layout: ParallelLayout, rank: int, owners: tuple[str, ...]
) -> slice:
    """The stored rows of a parameter that a rank owns; `owners` are the axes that shard them."""
    grid = layout.experts if parameter.is_expert else layout.attention
    coordinates = layout.coordinates(rank)
    owner, count = 0, 1
    for axis, size in zip(grid.axes, grid.sizes, strict=True):  # innermost first: in rank order
        if axis in owners:
            owner, count = owner + coordinates[axis] * count, count * size
    return owned_rows(parameter.stored_shape(layout)[0], owner, count)
