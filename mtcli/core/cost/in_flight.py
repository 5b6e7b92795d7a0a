"""What the pipeline's schedule has in flight on each rank, quick to know for a large pipeline."""

from collections.abc import Iterable
from functools import cache
from itertools import accumulate

from mtcli.core.cost.workload import Workload
from mtcli.core.schedule.check import in_flight
from mtcli.core.schedule.generators import schedule_for
from mtcli.core.schedule.ops import Kind

Pair = tuple[int, int]

# What an op of a split backward adds to micro-batches between F and I, and between I and W.
STEPS: dict[Kind, Pair] = {"F": (1, 0), "I": (-1, 1), "W": (0, -1)}


def in_flight_chunks(work: Workload) -> tuple[int, ...]:
    """Micro-batches in flight, times vpp, on each pipeline rank."""
    pp, vpp = work.layout.pp, work.layout.vpp
    if pp == 1:
        return (vpp,)
    if work.schedule_name == "gpipe":
        return (work.num_micro_batches * vpp,) * pp
    return _chunks(work.schedule_name, pp, vpp, _filling(work))


def splits(work: Workload) -> bool:
    """Whether the schedule splits backwards."""
    return work.schedule_name == "zero_bubble" and work.layout.pp > 1


def split_moments(work: Workload, pp_rank: int) -> tuple[set[Pair], set[Pair]]:
    """What a rank holds at most where backwards are split, between ops and when an I begins:
    (micro-batches between F and I, between I and W)."""
    return _pairs(work.schedule_name, work.layout.pp, _filling(work))[pp_rank]


def _filling(work: Workload) -> int:
    """Micro-batches that fill the pipeline as all of a step's do.

    The first pp of them do so; with chunks the second group of pp, and as a last group takes a
    remainder with it, that too.
    """
    pp, m = work.layout.pp, work.num_micro_batches
    if work.layout.vpp == 1:
        return min(m, pp)
    return m if m < 2 * pp else 2 * pp + m % pp


@cache
def _chunks(name: str, pp: int, vpp: int, num_micro_batches: int) -> tuple[int, ...]:
    return in_flight(schedule_for(name, pp, vpp, num_micro_batches))


@cache
def _pairs(name: str, pp: int, num_micro_batches: int) -> list[tuple[set[Pair], set[Pair]]]:
    found = []
    for ops in schedule_for(name, pp, 1, num_micro_batches).ops:
        after = list(accumulate((STEPS[op.kind] for op in ops), _sum))
        before_halves = {held for held, op in zip(after, ops[1:], strict=False) if op.kind == "I"}
        found.append((_most(after), _most(before_halves)))
    return found


def _most(pairs: Iterable[Pair]) -> set[Pair]:
    """Those pairs to which no other is equal or larger in both numbers: where bytes are most."""
    found, most = set(), -1
    for whole, halves in sorted(set(pairs), key=lambda pair: (pair[1], pair[0]), reverse=True):
        if whole > most:
            found.add((whole, halves))
            most = whole
    return found


def _sum(a: Pair, b: Pair) -> Pair:
    return a[0] + b[0], a[1] + b[1]
