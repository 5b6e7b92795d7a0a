"""What the pipeline's schedule has in flight on each rank, quick to know for a large pipeline."""

from collections.abc import Iterable, Sequence
from functools import cache
from operator import ge
from typing import NamedTuple

from mtcli.core.plan.workload import Workload, schedule_of
from mtcli.core.schedule.ops import Op

# Of each of a rank's chunks, micro-batches between F and B or I; then of each, those between I and
# W; then of each, 1 where its last op was an F, after which zero=3 keeps its ends gathered; then of
# each, within a W, 1 where an I was before it, whose gradient is still held where it was sent.
Counts = tuple[int, ...]


class Moments(NamedTuple):
    """What a rank holds at most: counts that no other of their kind exceed in every number."""

    between: list[Counts]  # ops
    forward: list[list[Counts]]  # within an F of each chunk, its own micro-batch included
    backward: list[list[Counts]]  # within a B or I
    rest: list[list[Counts]]  # within a W


def in_flight_chunks(work: Workload) -> tuple[int, ...]:
    """Micro-batches in flight, times vpp, on each pipeline rank."""
    ranks = range(work.layout.pp)
    chunks = 2 * work.layout.vpp
    between = (moments(work, pp_rank).between for pp_rank in ranks)
    return tuple(max(sum(counts[:chunks]) for counts in most) for most in between)


def splits(work: Workload) -> bool:
    """Whether the schedule splits backwards."""
    return work.schedule_name == "zero_bubble" and work.layout.pp > 1


def moments(work: Workload, pp_rank: int) -> Moments:
    """What a pipeline rank holds at most, between ops and within one."""
    pp, vpp = work.layout.pp, work.layout.vpp
    if work.schedule_name == "gpipe" and pp > 1:
        everyone: list[Counts] = [(work.num_micro_batches, 0, 0, 0)]
        return Moments(everyone, [everyone], [everyone], [[]])
    return _moments(work.schedule_name, pp, vpp, _filling(work), pp_rank)


def _filling(work: Workload) -> int:
    """Micro-batches that fill the pipeline as all of a step's do.

    The first pp of them do so; with chunks the second group of pp, and as a last group takes a
    remainder with it, that too.
    """
    pp, m = work.layout.pp, work.num_micro_batches
    if pp == 1 or work.layout.vpp == 1:
        return min(m, pp)
    return m if m < 2 * pp else 2 * pp + m % pp


@cache
def _moments(name: str, pp: int, vpp: int, num_micro_batches: int, pp_rank: int) -> Moments:
    return _of_rank(schedule_of(name, pp, vpp, num_micro_batches).ops[pp_rank], pp, vpp)


def _of_rank(ops: Sequence[Op], pp: int, vpp: int) -> Moments:
    held, halves, gathered, sent = [0] * 4 * vpp, vpp, 2 * vpp, 3 * vpp
    forward: list[set[Counts]] = [set() for _ in range(vpp)]
    backward: list[set[Counts]] = [set() for _ in range(vpp)]
    rest: list[set[Counts]] = [set() for _ in range(vpp)]
    between: set[Counts] = set()
    for op in ops:
        chunk = op.stage // pp
        if op.kind == "W":
            rest[chunk].add(tuple(held))
            held[halves + chunk] -= 1
            continue
        held[gathered + chunk] = 0  # its own ends are on the op's tape
        held[sent:] = [0] * vpp
        if op.kind == "F":
            held[chunk] += 1
            forward[chunk].add(tuple(held))
            held[gathered + chunk] = 1
        else:
            backward[chunk].add(tuple(held))
            held[chunk] -= 1
            held[halves + chunk] += op.kind == "I"
        between.add(tuple(held))
        held[sent + chunk] = int(op.kind == "I")
    within = ([_most(found) for found in kinds] for kinds in (forward, backward, rest))
    return Moments(_most(between), *within)


def _most(found: Iterable[Counts]) -> list[Counts]:
    front: list[Counts] = []
    for counts in sorted(found, key=sum, reverse=True):  # none has less than one it exceeds
        if not any(all(map(ge, other, counts)) for other in front):
            front.append(counts)
    return front
