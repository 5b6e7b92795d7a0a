"""The rank layout by mesh axis: an attention grid and an expert grid over the same ranks.

A rank is a mixed-radix number, innermost axis first: tp-cp-dp-pp for attention and etp-ep-edp-pp
for experts. pp is outermost in both, so that both agree on the pipeline (MoE Parallel Folding,
arXiv:2504.14960, section 3; its printed listing, with tp innermost and pp inside dp, does not).
Where replicas of the model may differ, their axis is between dp and pp in both grids.

In two-dimensional tensor parallelism (arXiv:2104.05343, section 3) the tp ranks are a grid of
tp_rows x tp / tp_rows, one row after another. Then axis "tp" runs along a row, whose ranks have the
same sequences and different heads and columns, as in one dimension; axis "tp_row" runs down a
column.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from mtcli.core.config.schema import ParallelConfig, RunConfig


@dataclass(frozen=True)
class Grid:
    """A mixed-radix numbering of ranks; `axes` and `sizes` are listed from the innermost axis
    outwards."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """The number of ranks along one axis."""
        return self.sizes[self.axes.index(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index along each axis."""
        coordinates = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank, coordinates[axis] = divmod(rank, size)
        return coordinates

    def rank(self, **coordinates: int) -> int:
        """The rank at some coordinates; unnamed axes are at 0."""
        rank = 0
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group of ranks that differ only along `axes`, each in rank order."""
        offsets = sorted(self._ranks([axis for axis in self.axes if axis in axes]))
        bases = sorted(self._ranks([axis for axis in self.axes if axis not in axes]))
        return [[base + offset for offset in offsets] for base in bases]

    def _ranks(self, axes: list[str]) -> list[int]:
        indices = product(*(range(self.size(axis)) for axis in axes))
        return [self.rank(**dict(zip(axes, index, strict=True))) for index in indices]


@dataclass(frozen=True)
class ParallelLayout:
    """The two grids of a world of ranks. `dp` and `edp` follow from the other axes."""

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    replicas: int = 1
    tp_rows: int = 1

    @classmethod
    def of_run(cls, config: RunConfig, world: int) -> "ParallelLayout":
        return replace(cls.of(config.parallel, world), replicas=config.num_replicas(world))

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int) -> "ParallelLayout":
        """The layout of a config on `world` ranks, which `check.problems` has found to divide."""
        p = parallel
        return cls(
            world, tp=p.tp, cp=p.cp, pp=p.pp, vpp=p.vpp, ep=p.ep, etp=p.etp, tp_rows=p.grid_rows
        )

    @property
    def tp_columns(self) -> int:
        """The size of axis tp: all tp ranks, or those of a row of their grid."""
        return self.tp // self.tp_rows

    @property
    def dp(self) -> int:
        """The data parallel size of attention, inside a replica."""
        return self.world // (self.tp * self.cp * self.pp * self.replicas)

    @property
    def batch_shards(self) -> int:
        """The number of ranks with different samples: the data ranks of all replicas."""
        return self.dp * self.replicas

    @property
    def edp(self) -> int:
        """The data parallel size of experts, inside a replica."""
        return self.world // (self.ep * self.etp * self.pp * self.replicas)

    @property
    def num_stages(self) -> int:
        """Pipeline stages: pp ranks of vpp chunks each."""
        return self.pp * self.vpp

    @cached_property
    def attention(self) -> Grid:
        """The grid of all parameters but the experts. The axes tp_row and replicas are in it only
        where the layout has them."""
        rows = {"tp_row": self.tp_rows} if self.tp_rows > 1 else {}
        return self._grid({"tp": self.tp_columns} | rows | {"cp": self.cp, "dp": self.dp})

    @cached_property
    def experts(self) -> Grid:
        """The grid of the experts, over the same ranks."""
        return self._grid({"etp": self.etp, "ep": self.ep, "edp": self.edp})

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index along every axis of both grids."""
        alone = {"tp_row": 0, "replica": 0}
        return alone | self.attention.coordinates(rank) | self.experts.coordinates(rank)

    def size(self, axis: str) -> int:
        """The size of an axis of either grid."""
        if axis in ("tp_row", "replica"):
            return self.tp_rows if axis == "tp_row" else self.replicas
        grid = self.attention if axis in self.attention.axes else self.experts
        return grid.size(axis)

    def stages(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank: r, r + pp, r + 2 pp, ... (arXiv:2104.04473, 2.2)."""
        return tuple(range(pp_rank, self.num_stages, self.pp))

    def _grid(self, inside: dict[str, int]) -> Grid:
        """The grid with some axes inside a replica."""
        sizes = inside | ({"replica": self.replicas} if self.replicas > 1 else {}) | {"pp": self.pp}
        return Grid(tuple(sizes), tuple(sizes.values()))
