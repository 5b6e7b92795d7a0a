"""Who keeps which rows of a parameter: what runs save by, and what a conversion cuts by.

A rank's rectangle of a parameter is stored as a matrix (Parameter.stored_shape), which may be cut
once more, by rows, over the ranks that hold the same rectangle and see other data: rank i of n
owners has rows [i * r, (i + 1) * r) with r = ceil(rows / n), the last ones fewer or none.
"""

from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.model_config import ModelConfig
from mtcli.core.spec.sharding import Parameter


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
