"""How a parameter is cut over ranks: one description that five readers share.

Initialisation, gradient reduction, the gradient norm, the checkpoint and the memory prediction all
ask here. Facts are kept by canonical name and never on an nn.Parameter, whose attributes are lost
in to_empty(), load_state_dict(assign=True) and deepcopy.

Who keeps which rows of a parameter: what runs save by, and what a conversion cuts by.

A rank's rectangle of a parameter is stored as a matrix (Parameter.stored_shape), which may be cut
once more, by rows, over the ranks that hold the same rectangle and see other data: rank i of n
owners has rows [i * r, (i + 1) * r) with r = ceil(rows / n), the last ones fewer or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal, NamedTuple

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.layout import ParallelLayout

VOCAB_MULTIPLE = 128  # rows of a vocabulary shard: tensor cores want multiples of 64 to 128
BOX_BYTES = 32 << 20  # of a tensor, that are held at a time where all of it is gone through

Init = Literal["normal", "residual", "ones", "zeros"]


class Box(NamedTuple):
    """A block of a global tensor: where it starts and its size, per dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def moved(self, by: tuple[int, ...]) -> "Box":
        """The rectangle of the same size that starts `by` further on."""
        start = tuple(a + b for a, b in zip(self.start, by, strict=True))
        return Box(start, self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block as an index into the global tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    @property
    def inside(self) -> tuple[slice, ...]:
        """The part of a local tensor that is the block; the rest is padding."""
        return tuple(slice(n) for n in self.size)


def boxes_of_at_most(size: tuple[int, ...], most: int) -> Iterator[Box]:
    """Rectangles that cut a tensor of a size into consecutive runs of its elements, in order, each
    of at most `most` elements; none where it is empty."""
    if prod(size) <= most or not size:
        if prod(size):
            yield Box((0,) * len(size), size)
        return
    inner = prod(size[1:])
    rows = most // inner
    for first in range(0, size[0], max(1, rows)):
        if rows:
            count = min(rows, size[0] - first)
            yield Box((first, *(0 for _ in size[1:])), (count, *size[1:]))
        else:
            for start, part in boxes_of_at_most(size[1:], most):
                yield Box((first, *start), (1, *part))


class RowBox(NamedTuple):
    """Consecutive rows of a rank's memory, and the rectangle of the global tensor they are."""

    rows: slice
    box: Box


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model, by canonical name; shapes are global and never padded.

    `cut` names, per dimension, the mesh axis that cuts it evenly (None: not cut). An axis that two
    dimensions name cuts the first as far as that divides it, and the second into what is left: 4
    ranks of ("tp", None, "tp") share 2 heads, half of the columns of a head each. `owner` is the
    block that holds it, or "first" / "last" for the pipeline's ends. A vocabulary dimension is
    padded on the ranks so that it cuts evenly: `padded` says which dimension that is. One that is
    not `trained` has no gradient and no optimizer state, and keeps at least float32.
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[str | None, ...]
    init: Init
    owner: int | Literal["first", "last"]
    padded: int | None = None
    trained: bool = True

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether it lives on the expert grid: one slice of the experts per ep rank."""
        return "ep" in self.cut

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices and tables, not to biases and norms."""
        return self.init in ("normal", "residual")

    def local_shape(self, layout: ParallelLayout) -> tuple[int, ...]:
        """The shape of what every rank holds, padding included."""
        sizes = zip(self._padded_shape(layout), self._parts(layout), strict=True)
        return tuple(-(-size // parts) for size, parts in sizes)

    def rectangle(self, layout: ParallelLayout, rank: int) -> Box:
        """The part of the global tensor that a rank holds; without padding, so maybe empty."""
        place, local, start = layout.place(rank), self.local_shape(layout), list[int]()
        dims = zip(self.shape, local, self.cut, self._parts(layout), strict=True)
        for size, n, axis, parts in reversed(list(dims)):
            part = 0
            if axis:  # neighbours differ in the last dimension that it cuts
                place[axis], part = divmod(place[axis], parts)
            start.insert(0, min(part * n, size))
        held = [min(n, s - a) for n, s, a in zip(local, self.shape, start, strict=True)]
        return Box(tuple(start), tuple(held))

    def stored_shape(self, layout: ParallelLayout) -> tuple[int, ...]:
        """What every rank allocates: `local_shape` as a matrix [rows, columns], or a vector.

        Data parallel ranks share rows. Rows of [2, ffn, hidden] alone would be too few for them.
        """
        local = self.local_shape(layout)
        return (prod(local[:-1]), local[-1]) if len(local) > 1 else local

    def blocks(self, layout: ParallelLayout, rank: int, rows: slice) -> Iterator[RowBox]:
        """The blocks that some stored rows of a rank are made of, counted from the first of them.

        Rows that pad the vocabulary are in none.
        """
        start, size = self.rectangle(layout, rank)
        columns = len(size) - 1 if len(size) > 1 else 1  # dimensions before them are rows
        leading = size[:columns]
        for at, extent in consecutive(leading, rows.start, min(rows.stop, prod(leading))):
            first = _place(at, leading) - rows.start
            corner = (*(a + b for a, b in zip(start, at, strict=False)), *start[columns:])
            box = Box(corner, (*extent, *size[columns:]))
            yield RowBox(slice(first, first + prod(extent)), box)

    def replicated_over(self, layout: ParallelLayout) -> tuple[str, ...]:
        """Axes of its grid, pipeline aside, along which ranks hold the same elements."""
        grid = layout.experts if self.is_expert else layout.attention
        return tuple(axis for axis in grid.axes if axis != "pp" and axis not in self.cut)

    def is_primary(self, layout: ParallelLayout, rank: int) -> bool:
        """Whether this rank is the one that counts and saves these elements."""
        place = layout.place(rank)
        return all(place[axis] == 0 for axis in self.replicated_over(layout))

    def gradient_axes(self, layout: ParallelLayout, sequence_parallel: bool) -> tuple[str, ...]:
        """Axes over which a rank's gradient is a partial sum.

        Data axes always are, since each rank sees other tokens. A parameter that tp does not cut
        sees 1/tp of the tokens under sequence parallelism (arXiv:2205.05198, 4.2.2) and all of
        them without.
        """
        axes = self.replicated_over(layout)
        return axes if sequence_parallel else tuple(axis for axis in axes if axis != "tp")

    def _parts(self, layout: ParallelLayout) -> list[int]:
        """Into how many parts each dimension is cut."""
        left = {axis: layout.size(axis) for axis in self.cut if axis}
        parts = []
        for dim, (size, axis) in enumerate(zip(self.shape, self.cut, strict=True)):
            if axis is None:
                parts.append(1)
                continue
            is_last = axis not in self.cut[dim + 1 :]
            parts.append(left[axis] if is_last else gcd(size, left[axis]))
            left[axis] //= parts[-1]
        return parts

    def _padded_shape(self, layout: ParallelLayout) -> tuple[int, ...]:
        if self.padded is None:
            return self.shape
        axis = self.cut[self.padded]
        multiple = VOCAB_MULTIPLE * (layout.size(axis) if axis else 1)
        rows = -(-self.shape[self.padded] // multiple) * multiple
        return (*self.shape[: self.padded], rows, *self.shape[self.padded + 1 :])


def consecutive(
    shape: tuple[int, ...], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, size) of the rectangles that elements first .. end - 1 of an array fill, in order."""
    if first >= end:
        return
    if len(shape) == 1:
        yield (first,), (end - first,)
        return
    inner = prod(shape[1:])
    row, begun = divmod(first, inner)
    if begun or end - first < inner:  # a part of one row, then the rest
        stop = min(end, (row + 1) * inner)
        for start, size in consecutive(shape[1:], begun, stop - row * inner):
            yield (row, *start), (1, *size)
        yield from consecutive(shape, stop, end)
        return
    rows = (end - first) // inner
    yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from consecutive(shape, first + rows * inner, end)


def _place(at: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The number of an element of an array in row-major order."""
    place = 0
    for index, size in zip(at, shape, strict=True):
        place = place * size + index
    return place


def cuts_parameters(zero: int, layout: ParallelLayout, model: ModelConfig) -> bool:
    """Whether parameters are cut over data ranks: zero = 3, and some of them have such ranks."""
    of_experts = layout.edp if model.num_experts else 1
    return zero == 3 and max(layout.dp * layout.cp, of_experts) > 1


def owner_axes(
    parameter: Parameter, layout: ParallelLayout, sequence_parallel: bool
) -> tuple[str, ...]:
    """The axes over which zero 1 and 3 cut a parameter: those of its gradient's sum but tp, and
    none where it is not trained."""
    if not parameter.trained:
        return ()
    summed = parameter.gradient_axes(layout, sequence_parallel)
    return tuple(axis for axis in summed if axis != "tp")


def answers_for(
    parameter: Parameter, layout: ParallelLayout, rank: int, owners: tuple[str, ...]
) -> bool:
    """Whether a rank counts and saves its share, where `owners` are the axes that cut it."""
    place = layout.place(rank)
    copies = [axis for axis in parameter.replicated_over(layout) if axis not in owners]
    return all(place[axis] == 0 for axis in copies)


def owned_rows(rows: int, owner: int, owners: int) -> slice:
    """Rows [first, last) of one of the owners; maybe none."""
    share = -(-rows // owners)
    first = min(owner * share, rows)
    return slice(first, min(first + share, rows))


def rows_on(
    parameter: Parameter, layout: ParallelLayout, rank: int, owners: tuple[str, ...]
) -> slice:
    """The stored rows of a parameter that a rank owns, where `owners` are the axes that cut it."""
    grid, place = layout.experts if parameter.is_expert else layout.attention, layout.place(rank)
    owner, count = 0, 1
    for axis, size in zip(grid.axes, grid.sizes, strict=True):  # innermost first: in rank order
        if axis in owners:
            owner, count = owner + place[axis] * count, count * size
    return owned_rows(parameter.stored_shape(layout)[0], owner, count)
