"""Who is where: the place of every rank on both grids, and every group of both.

As text, worlds of more than WHOLE ranks are told by ranges: pipeline stages are alike, so that the
first one says it all, and so do the first and the last group of an axis.
"""

from mtcli.core.spec.layout import Grid, ParallelLayout

Groups = dict[str, list[list[int]]]
WHOLE = 64  # ranks that are listed one by one
ROWS = 16  # of ranges, of which the middle is left out


def rank_places(layout: ParallelLayout) -> list[dict[str, dict[str, int]]]:
    """Each rank's place on the attention grid and on the expert grid, outermost axis first."""
    grids = {"attention": layout.attention, "experts": layout.experts}
    return [
        {name: _outermost_first(grid, grid.coordinates(rank)) for name, grid in grids.items()}
        for rank in range(layout.world)
    ]


def rank_groups(layout: ParallelLayout) -> dict[str, Groups]:
    """Every group of ranks that talk to each other along one axis, per grid and axis."""
    grids = {"attention": layout.attention, "experts": layout.experts}
    return {
        name: {axis: grid.groups(axis) for axis in reversed(grid.axes)}
        for name, grid in grids.items()
    }


def rank_table(layout: ParallelLayout) -> tuple[str, list[str], list[list[str]]]:
    """(title, headings, rows): a row per rank, or per range of ranks of the first stage."""
    places, groups = rank_places(layout), rank_groups(layout)
    axes = [(grid, axis) for grid in groups for axis in groups[grid]]
    columns = ["ranks", *(axis for _, axis in axes)]
    title = "Ranks on the attention grid, and on the expert grid"
    size = 1
    if layout.world > WHOLE:
        size, stage = layout.tp, layout.world // layout.pp
        places = places[:stage]
        title += f": stage 0 of {layout.pp}; stage p holds ranks p*{stage} to p*{stage}+{stage - 1}"
    rows = []
    for first in range(0, len(places), size):
        those = places[first : first + size]
        cells = [_range([place[grid][axis] for place in those]) for grid, axis in axes]
        rows.append([_range(list(range(first, first + size))), *cells])
    if layout.world > WHOLE and len(rows) > ROWS:
        rows = [*rows[: ROWS - 2], ["..."] * len(columns), rows[-1]]
    return title, columns, rows


def group_lines(layout: ParallelLayout) -> list[str]:
    """A line per axis of either grid with its groups: all, or how many there are and the ends."""
    lines = []
    for grid, axes in rank_groups(layout).items():
        for axis, members in axes.items():
            if layout.world <= WHOLE:
                lines.append(f"{grid} {axis}: {' '.join(str(group) for group in members)}")
                continue
            ends = [members[0], members[-1]] if len(members) > 1 else members
            told = ", ".join(_range(group) for group in ends)
            lines.append(f"{grid} {axis}: {len(members):,} groups of {len(members[0]):,}: {told}")
    return lines


def _range(numbers: list[int]) -> str:
    """`0-7`, or `0-56 by 8`, or a list where steps differ."""
    first, last = numbers[0], numbers[-1]
    steps = {b - a for a, b in zip(numbers, numbers[1:], strict=False)}
    if first == last and steps <= {0}:
        return str(first)
    if len(steps) > 1:
        return " ".join(map(str, numbers))
    step = steps.pop()
    return f"{first}-{last}" if step == 1 else f"{first}-{last} by {step}"


def _outermost_first(grid: Grid, places: dict[str, int]) -> dict[str, int]:
    return {axis: places[axis] for axis in reversed(grid.axes)}
