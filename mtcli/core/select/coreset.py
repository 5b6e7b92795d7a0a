"""Chooses a core-set of points: CRAIG (arXiv:1906.01827), within groups and in bounded memory.

Equal points are one point with a count. Lazy greedy chooses from up to MOST points of a group at
once: with all similarities in memory where these fit, else in blocks. More points are dealt into
random parts, which ranks share (GreeDi, arXiv:1411.0541). Each part chooses several times its
share, and a second round picks the best of these for a weighted sample of all points. The choice
depends on no layout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.groups import Axis
from mtcli.core.select.distances import Points, nearest, similarities
from mtcli.core.select.facility_location import GREEDY, Goal, Greedy

MOST = 1 << 16  # points that greedy sees at once; more are dealt into parts
PART = 1 << 14  # points of a part: n * PART distances are made
OVERSAMPLED = 4  # times its share that a part chooses at most, for the second round
DRAWN = 0.75  # of the weight that the second round sees, on points that were drawn
DENSE = 1 << 14  # points whose similarities are kept in memory: 1 GiB of float32


class Chosen(NamedTuple):
    """Chosen candidates in the order of their picks, and the candidates that each stands for."""

    indices: np.ndarray  # int64 [r]
    weights: np.ndarray  # float64 [r]
    objective: float | None  # F: facility location; None where there are no proxies
    bound: float | None  # L: the sum of every candidate's distance to its nearest chosen one
    error: float | None = None  # |sum of g_i - sum of gamma_j g_j|, which L bounds


class Quota(NamedTuple):
    """The numbers to choose of each group: `budgets`, or, with `cover`, as many as bring L to at
    most `cover` times the sum of the group's proxy norms."""

    budgets: Sequence[int]
    cover: float | None = None


@dataclass(frozen=True)
class Work:
    """The context of a choice: ranks, device, seed, algorithm, and a callback for each pick."""

    world: Axis
    device: torch.device
    seed: int
    greedy: Greedy = "lazy"
    advance: Callable[[int], object] = lambda done: None


class _Part(NamedTuple):
    """Distinct points of a group that greedy sees at once."""

    group: int
    points: np.ndarray  # int64 [m], ascending ids
    counts: np.ndarray  # float64 [m], how many points each stands for
    size: int
    residual: float = -1.0  # L at which picks may end; below 0 they go on to the size
    among: np.ndarray | None = None  # bool [m]: the candidates; None is all


class _Picked(NamedTuple):
    points: list[int]
    counts: list[float]  # of the part's points that are nearest to each


def choose(proxies: Tensor, groups: Sequence[np.ndarray], target: Quota, work: Work) -> Chosen:
    """Chooses the core-set of each group of candidates over their proxies [n, d].

    `groups` are ids, ascending; weights of a group sum to its size. The order takes from the groups
    in turn, so that every prefix has some of each. Collective.
    """
    distinct = [_distinct(proxies, ids) for ids in groups]
    budgets = [len(points) for points, _ in distinct]
    if target.cover is None:
        budgets = [min(pair) for pair in zip(target.budgets, budgets, strict=True)]
    pools = [_Part(group, *distinct[group], size) for group, size in enumerate(budgets)]
    parts = [part for pool in pools for part in _deal(proxies, pool, target, work)]
    orders, again = [], []
    picked = _shared(proxies, parts, work)
    for group, pool in enumerate(pools):
        of_group = [picks for part, picks in zip(parts, picked, strict=True) if part.group == group]
        orders.append(round_robin([picks.points for picks in of_group]))
        if len(orders[group]) > pool.size:
            again.append(_second_round(pool, of_group, work.seed))
    for part, picks in zip(again, _shared(proxies, again, work), strict=True):
        orders[part.group] = picks.points
    if target.cover is None:
        for order, ids, budget in zip(orders, groups, target.budgets, strict=True):
            order.extend(np.setdiff1d(ids, order)[: budget - len(order)].tolist())
    return judge(proxies, groups, orders, work)


def random_orders(
    groups: Sequence[np.ndarray], budgets: Sequence[int], seed: int
) -> list[list[int]]:
    """Draws `budgets` ids of each group by the seed."""
    random = np.random.default_rng([seed, 1])
    pairs = zip(groups, budgets, strict=True)
    return [random.choice(ids, size, replace=False).tolist() for ids, size in pairs]


def unjudged(orders: Sequence[list[int]]) -> Chosen:
    """Chosen candidates with weights of 1, and no objective or bound."""
    indices = np.array(round_robin(orders), np.int64)
    return Chosen(indices, np.ones(len(indices)), None, None)


def with_error(chosen: Chosen, proxies: Tensor) -> Chosen:
    """Adds the error of the weighted sum of the chosen proxies [n, d], in float64."""
    picked = proxies[torch.from_numpy(chosen.indices)].double()
    difference = proxies.sum(0, dtype=torch.float64) - torch.from_numpy(chosen.weights) @ picked
    return chosen._replace(error=float(difference.norm()))


def evenly_weighed(chosen: Chosen, groups: Sequence[np.ndarray]) -> Chosen:
    """Gives the chosen candidates of a group equal weights, which sum to its size."""
    weights = np.empty(len(chosen.indices))
    for ids in groups:
        of_group = np.isin(chosen.indices, ids)
        weights[of_group] = len(ids) / max(1, of_group.sum())
    return chosen._replace(weights=weights)


def judge(
    proxies: Tensor, groups: Sequence[np.ndarray], orders: Sequence[list[int]], work: Work
) -> Chosen:
    """Weighs the chosen candidates of each group, and computes objective and bound.

    The weight gamma_j counts the candidates to which j is the nearest choice, j itself included;
    ties go to the lowest id.
    """
    weights: dict[int, float] = {}
    objective = residual = 0.0
    for ids, order in zip(groups, orders, strict=True):
        points = _points(proxies, ids, work)
        chosen = np.sort(np.array(order, np.int64))
        positions = torch.from_numpy(np.searchsorted(ids, chosen)).to(work.device)
        assigned, distance = nearest(points, positions, work.advance)
        gamma = assigned.bincount(minlength=len(chosen)).double().tolist()
        weights |= zip(chosen.tolist(), gamma, strict=True)
        of_group = float(distance.double().sum())
        residual += of_group
        objective += len(ids) * points.reach - of_group
    indices = round_robin(orders)
    gammas = np.array([weights[index] for index in indices])
    return Chosen(np.array(indices, np.int64), gammas, objective, residual)


def planned_bytes(sizes: Sequence[int], width: int) -> int:
    """Peak bytes of the process: proxies of all groups [n, width], and either copies of the largest
    group's or similarities.
    """
    largest = max(sizes)
    points = largest if largest <= MOST else PART
    copy = 4 * 3 * (width + 2)
    greedy = 4 * points**2 + 2 * copy * points if points <= DENSE else copy * points
    return (4 * width + 64) * sum(sizes) + max(copy * largest, greedy) + (400 << 20)


def _points(proxies: Tensor, ids: np.ndarray, work: Work) -> Points:
    """The points of some ids: in float64 where all their similarities fit in memory."""
    points = proxies[torch.from_numpy(ids)].to(work.device)
    return Points(points.double() if len(ids) <= DENSE else points)


def _distinct(proxies: Tensor, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the first of each set of equal points, ascending; how many there are of it)."""
    digests = bytearray(16 * len(ids))
    for row, index in enumerate(ids.tolist()):
        digests[16 * row : 16 * row + 16] = xxhash.xxh3_128_digest(proxies[index].numpy().data)
    hashes = np.frombuffer(digests, "V16")
    _, firsts, counts = np.unique(hashes, return_index=True, return_counts=True)
    order = np.argsort(firsts)
    return ids[firsts[order]], counts[order].astype(np.float64)


def _deal(proxies: Tensor, group: _Part, target: Quota, work: Work) -> list[_Part]:
    """Deals a group's points into parts of equal size by the seed; one where greedy sees all.

    Parts choose up to OVERSAMPLED times their share, and in all at most MOST / 2: the second round
    sees as many drawn points.
    """
    number = 1 if len(group.points) <= MOST else -(-len(group.points) // PART)
    over = max(1, min(OVERSAMPLED, MOST // 2 // group.size))
    over = 1 if target.cover is not None or number == 1 else over
    dealt = np.random.default_rng([work.seed, 0]).permutation(len(group.points))
    parts = []
    for index, some in enumerate(np.array_split(dealt, number)):
        some.sort()
        share = group.size * (index + 1) // number - group.size * index // number
        points, residual = group.points[some], -1.0
        if target.cover is not None:
            norms = proxies[torch.from_numpy(points)].double().norm(dim=1).numpy()
            residual = target.cover * float(norms @ group.counts[some])
            share = len(some)
        size = min(len(some), over * share)
        parts.append(_Part(group.group, points, group.counts[some], size, residual))
    return parts


def _second_round(pool: _Part, firsts: Sequence[_Picked], seed: int) -> _Part:
    """The second round: the picks of all parts as candidates, and random points up to MOST.

    A pick counts for the points that were nearest to it; a drawn point counts for equally many
    others. Picks have 1 - DRAWN of the weight: they cover all points, but at moved places.
    """
    picks = np.searchsorted(pool.points, [point for picked in firsts for point in picked.points])
    size = len(pool.points)
    drawn = np.random.default_rng([seed, 2]).choice(size, min(MOST - len(picks), size), False)
    counts = np.zeros(size)
    counts[picks] = [(1.0 - DRAWN) * count for picked in firsts for count in picked.counts]
    part = pool.counts[drawn].sum() / pool.counts.sum()
    counts[drawn] += DRAWN / part * pool.counts[drawn]
    counted = np.flatnonzero(counts)
    among = np.isin(counted, picks)
    return pool._replace(points=pool.points[counted], counts=counts[counted], among=among)


def _shared(proxies: Tensor, parts: Sequence[_Part], work: Work) -> list[_Picked]:
    """The picks of all parts, which ranks share. Collective."""
    rank, ranks = work.world.rank, work.world.size
    busy = min(ranks, len(parts))
    local_picks = [_pick(proxies, part, work, busy) for part in parts[rank::ranks]]
    gathered = gather_values(local_picks, work.world)
    return [_Picked(*gathered[number % ranks][number // ranks]) for number in range(len(parts))]


def _pick(proxies: Tensor, part: _Part, work: Work, busy: int) -> _Picked:
    points = _points(proxies, part.points, work)
    counts = torch.from_numpy(part.counts).to(points.left)
    similar = similarities(points, points.reach, len(points) <= DENSE)
    goal = Goal(part.size)
    if part.among is not None:
        goal = Goal(part.size, among=torch.from_numpy(part.among).to(work.device))
    elif part.residual >= 0.0:
        goal = Goal(part.size, float(counts.double().sum()) * points.reach - part.residual)
    order = GREEDY[work.greedy](
        similar, counts, goal, lambda done: work.advance(done * busy), work.seed
    ).order
    chosen = torch.tensor(sorted(order), device=work.device)
    assigned, _ = nearest(points, chosen, lambda done: None)
    carried = assigned.bincount(counts.double(), len(chosen)).tolist()
    by_point = dict(zip(chosen.tolist(), carried, strict=True))
    return _Picked(part.points[order].tolist(), [by_point[point] for point in order])


def round_robin(orders: Sequence[list[int]]) -> list[int]:
    """The first of each, the second of each, and so on."""
    longest = max(map(len, orders))
    return [order[turn] for turn in range(longest) for order in orders if turn < len(order)]
