"""Suggests the legal layouts nearest to a refused one, with the flags that choose them.

The nearest changes the fewest fields, and among those has the smallest sum of |log2| of the ratios
of sizes. The search deepens by the number of fields; the caller, who has the rules, decides whether
a layout is legal.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from math import inf, log2
from typing import Any, NamedTuple

from mtcli.core.config.fields import divisors
from mtcli.core.config.schema import RunConfig

LayoutSizes = dict[str, Any]  # some of the fields that make a layout: FIELDS, by their own names
Legal = Callable[[RunConfig, int], bool]  # of a config on a world of ranks

FIELDS = ("micro_batch_size", "tp", "cp", "pp", "vpp", "schedule", "ep", "etp")
ALONE = dict.fromkeys(FIELDS, 1) | {"schedule": "1f1b"}
SHOWN = 3  # layouts that a user is told
MOST_STEPS, MOST_ASKED = 30_000, 500  # of the search, before it gives up: 0.1 s together
LARGEST_FREE = 64  # ranks along an axis that are tried where the world is not given


class Near(NamedTuple):
    """A legal layout. Layouts sort by nearness, then by sizes, so that the order is unique."""

    changed: int  # fields
    far: float  # sum of |log2(new / old)|
    sizes: tuple[Any, ...]  # of FIELDS
    world: int


def nearest_layouts(config: RunConfig, world: int | None, legal: Legal) -> list[Near]:
    """Finds the SHOWN nearest legal layouts on `world` ranks, or on as many as each needs where
    that is None; nearest first.

    There are fewer where no more exist or the search gives up. A layout is left out where its
    changes include all those of a nearer one.
    """
    axes = [sorted(moves, key=lambda m: m[:2]) for moves in _moves(config, world, legal)]
    if not all(axes):  # an axis that no size fits leaves no layout
        return []
    search = _Search(config, world, legal, axes)
    for changed in range(1, len(FIELDS) + 1):
        search.deepen(changed)
        if len(search.layouts) == SHOWN or search.gave_up:
            break
    return search.layouts


def nearest_hint(config: RunConfig, world: int | None, legal: Legal) -> str:
    """Words the nearest legal layouts with the flags that choose them; empty where there are
    none."""
    layouts = nearest_layouts(config, world, legal)
    flags = [_flags(config, near) for near in layouts]
    width = max(map(len, flags), default=0)
    rows = [f"  {flag:{width}}   {_words(near)}" for flag, near in zip(flags, layouts, strict=True)]
    where = f" on {world} rank{'s' * (world > 1)}" if world else ""
    lines = [f"the nearest legal layouts{where}:", *rows, "`mtcli plan` says which fit in memory"]
    return "\n".join(lines) if rows else ""


def layout_sizes(config: RunConfig) -> LayoutSizes:
    """Returns the sizes of a config's FIELDS."""
    p, b = config.parallel, config.batch
    sizes = (b.micro_batch_size, p.tp, p.cp, p.pp, p.vpp, p.schedule, p.ep, p.etp)
    return dict(zip(FIELDS, sizes, strict=True))


def with_sizes(config: RunConfig, sizes: LayoutSizes) -> RunConfig:
    """Copies a config with some of its FIELDS changed."""
    parallel = dict(sizes)
    batch = {name: parallel.pop(name) for name in FIELDS[:1] if name in sizes}
    changed = {
        "parallel": config.parallel.model_copy(update=parallel),
        "batch": config.batch.model_copy(update=batch),
    }
    return config.model_copy(update=changed)


def _flags(config: RunConfig, near: Near) -> str:
    changed = dict(_changes(config, near.sizes))
    batch = [f"--set batch.{name}={changed.pop(name)}" for name in FIELDS[:1] if name in changed]
    return " ".join([f"--set parallel.{name}={size}" for name, size in changed.items()] + batch)


def _changes(config: RunConfig, sizes: tuple[Any, ...]) -> list[tuple[str, Any]]:
    now = layout_sizes(config)
    return [(name, n) for name, n in zip(FIELDS, sizes, strict=True) if n != now[name]]


def _words(near: Near) -> str:
    _, tp, cp, pp, vpp, _, ep, etp = near.sizes
    dp = near.world // (tp * cp * pp)
    sizes = {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "dp": dp, "ep": ep, "etp": etp}
    always = ("tp", "pp", "dp")
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1 or axis in always)


class _Move(NamedTuple):
    """A choice of sizes for one axis, possibly the current ones."""

    changed: int
    far: float
    sizes: LayoutSizes


class _Search:
    """A depth-first search over the axes by branch and bound, up to MOST_STEPS and MOST_ASKED."""

    def __init__(
        self, config: RunConfig, world: int | None, legal: Legal, axes: list[list[_Move]]
    ) -> None:
        self.config, self.world, self.legal, self.axes = config, world, legal, axes
        tails = [self.axes[depth:] for depth in range(len(self.axes) + 1)]
        self.fewest = [sum(min(m.changed for m in moves) for moves in tail) for tail in tails]
        self.most = [sum(max(m.changed for m in moves) for moves in tail) for tail in tails]
        self.nearest = [sum(min(m.far for m in moves) for moves in tail) for tail in tails]
        self.steps, self.asked = 0, 0
        self.layouts: list[Near] = []
        self.nearer: list[set[tuple[str, Any]]] = []  # what those with fewer changes change

    @property
    def gave_up(self) -> bool:
        """True where the search ended before it was complete."""
        return self.steps > MOST_STEPS or self.asked > MOST_ASKED

    def deepen(self, changed: int) -> None:
        """Finds the nearest layouts that change this many fields, up to SHOWN in all."""
        self.nearer = [set(_changes(self.config, near.sizes)) for near in self.layouts]
        self._walk(changed, 0.0, {})

    def _walk(self, left: int, far: float, sizes: LayoutSizes, depth: int = 0) -> None:
        if depth == len(self.axes):
            self._take(sizes, far)
            return
        for move in self.axes[depth]:
            self.steps += 1
            changes_left, near = left - move.changed, far + move.far + self.nearest[depth + 1]
            if self.gave_up or not self.fewest[depth + 1] <= changes_left <= self.most[depth + 1]:
                continue
            bound = self.layouts[-1].far if len(self.layouts) == SHOWN else inf
            if near <= bound + 1e-9 and self._fits(chosen := sizes | move.sizes):
                self._walk(changes_left, far + move.far, chosen, depth + 1)

    def _fits(self, chosen: LayoutSizes) -> bool:
        """Says whether the axes chosen so far fit in the world, as a cheap test before the
        rules."""
        if self.world is None:
            return True
        tp, cp, pp, ep, etp = (chosen.get(axis, 1) for axis in ("tp", "cp", "pp", "ep", "etp"))
        if self.world % (tp * cp * pp) or self.world % (pp * ep * etp):
            return False
        used = chosen.get("micro_batch_size", 0) * self.world // (tp * cp * pp)
        return not used or self.config.batch.global_batch_size % used == 0

    def _take(self, sizes: LayoutSizes, far: float) -> None:
        key = tuple(sizes[name] for name in FIELDS)
        changes = _changes(self.config, key)
        if any(nearer.issubset(changes) for nearer in self.nearer):
            return
        self.asked += 1
        config = with_sizes(self.config, sizes)
        world = self.world or config.parallel.smallest_world
        if self.legal(config, world):
            insort(self.layouts, Near(len(changes), round(far, 9), key, world))
            del self.layouts[SHOWN:]


def _moves(config: RunConfig, world: int | None, legal: Legal) -> Iterator[list[_Move]]:
    """Yields the moves of each axis by itself. The pipeline's fields form one axis, as they depend
    on each other."""
    now, free = layout_sizes(config), config.parallel.model_copy(update={"stage_layers": ()})
    bare = config.model_copy(update={"parallel": free})
    for axis in ("tp", "cp"):
        yield _of(now, bare, legal, ({axis: n} for n in _values(now[axis], world)))
    yield _of(now, config, legal, _pipelines(config, world))
    for axis in ("ep", "etp"):
        yield _of(now, bare, legal, ({axis: n} for n in _values(now[axis], world)))
    sizes = divisors(config.batch.global_batch_size)
    yield _of(now, bare, legal, ({"micro_batch_size": n} for n in sizes))


def _values(now: int, world: int | None) -> list[int]:
    return divisors(world) if world else list(range(1, min(2 * now, LARGEST_FREE) + 1))


def _pipelines(config: RunConfig, world: int | None) -> Iterator[LayoutSizes]:
    p = config.parallel
    chunks = divisors(len(p.stage_layers) or config.model.num_layers)
    for pp in _values(p.pp, world):
        for vpp in chunks:
            for schedule in sorted({p.schedule, "1f1b", "interleaved"}):
                yield {"pp": pp, "vpp": vpp, "schedule": schedule}


def _of(
    now: LayoutSizes, config: RunConfig, legal: Legal, options: Iterable[LayoutSizes]
) -> list[_Move]:
    moves = []
    for sizes in options:
        if _is_legal_alone(config, sizes, legal):
            changed = {name: size for name, size in sizes.items() if size != now[name]}
            ratios = (size / now[name] for name, size in changed.items() if name != "schedule")
            moves.append(_Move(len(changed), sum(abs(log2(r)) for r in ratios), sizes))
    return moves


def _is_legal_alone(config: RunConfig, sizes: LayoutSizes, legal: Legal) -> bool:
    """Says whether sizes are legal on just their own ranks, with the fewest or the most sequences
    in a micro-batch. Sizes that are not would be illegal with any others."""
    few = with_sizes(config, ALONE | sizes)
    world, most = few.parallel.smallest_world, config.batch.global_batch_size
    batch = few.batch.model_copy(update={"global_batch_size": world * most})
    few = few.model_copy(update={"batch": batch})
    return legal(few, world) or legal(with_sizes(few, {FIELDS[0]: most}), world)
