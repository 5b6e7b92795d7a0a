"""Who is where: the place of every rank on both grids, and every group of both."""

from mtcli.core.spec.layout import Grid, ParallelLayout

Groups = dict[str, list[list[int]]]


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


def _outermost_first(grid: Grid, places: dict[str, int]) -> dict[str, int]:
    return {axis: places[axis] for axis in reversed(grid.axes)}
