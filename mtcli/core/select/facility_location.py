"""Maximises facility location, F(S) = sum over i of m_i max over j in S of s_ij, by greedy picks.

F is monotone and submodular where similarities are not negative, so that greedy picks reach 1 - 1/e
of the optimum (Nemhauser et al., 1978). Point i counts m_i times. Of equal gains, to the rounding
of their sums, the lowest index is picked. n points and candidates; b of them at a time.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

LOSS = 0.1  # of stochastic greedy: its expected value is 1 - 1/e - LOSS of the optimum
TIES = 32.0  # roundings by which equal gains may differ
FIRST_REFRESH = 8  # candidates whose gains lazy greedy computes again at once, at first
Advance = Callable[[int], object]
Greedy = Literal["lazy", "naive", "stochastic"]


class Similarities(Protocol):
    """Similarities s_ij = s_ji >= 0 of n points, which are the candidates too; made on demand."""

    size: int  # n
    block: int  # candidates whose rows are in memory at once

    def rows(self, candidates: Tensor) -> Tensor:
        """Computes the similarities of all points to some candidates [b, n], which the caller may
        write over, and the next call does."""


class MatrixSimilarities:
    """Similarities that are all in memory [n, n], maybe in a narrower dtype than their sums."""

    def __init__(self, rows: Tensor, block: int = 64) -> None:
        self.matrix, self.size, self.block = rows, len(rows), block

    def rows(self, candidates: Tensor) -> Tensor:
        """Copies of their rows [b, n], in float64."""
        return self.matrix[candidates].double()


class Goal(NamedTuple):
    """The end of picking: `size` picks, or a `value` of F if sooner; the points to pick from."""

    size: int
    value: float = math.inf
    among: Tensor | None = None  # bool [n]; None is all


class Picks(NamedTuple):
    """Candidates in the order in which they were picked, and what each added to F."""

    order: list[int]
    gains: list[float]

    @property
    def value(self) -> float:
        """F of all of them."""
        return math.fsum(self.gains)


def lazy_greedy(
    similarities: Similarities,
    counts: Tensor,
    goal: Goal,
    advance: Advance = lambda done: None,
    seed: int = 0,
) -> Picks:
    """Picks greedily, and recomputes only gains that may be the largest.

    A gain never grows, so an old one is a bound (Minoux, 1978). The largest bounds are refreshed
    in blocks that double until no other one can win or tie. Where a pick is the new best of fewer
    points than the gains it refreshed, all bounds are lowered exactly (`lower_`).
    `counts` are the m_i [n]; the seed decides nothing.
    """
    state = _state(similarities, counts, goal)
    candidates = state.open.nonzero().flatten()
    bounds = torch.full_like(counts, -math.inf)
    bounds[candidates] = state.gains(candidates)
    while not state.reached(goal):
        winner = state.refresh_(bounds)
        previous_best = state.pick(winner, float(bounds[winner]))
        state.lower_(bounds, previous_best)
        bounds[winner] = -math.inf
        advance(1)
    return state.picks


def naive_greedy(
    similarities: Similarities,
    counts: Tensor,
    goal: Goal,
    advance: Advance = lambda done: None,
    seed: int = 0,
) -> Picks:
    """Picks greedily, from the gains of all candidates each time: n^2 similarities a pick."""
    state = _State(similarities, counts, goal)
    return _scan(state, lambda: state.open.nonzero().flatten(), goal, advance)


def stochastic_greedy(
    similarities: Similarities,
    counts: Tensor,
    goal: Goal,
    advance: Advance = lambda done: None,
    seed: int = 0,
) -> Picks:
    """Picks the best of (n / size) ln(1 / LOSS) random candidates each time: n ln(1 / LOSS) gains
    in all (Mirzasoleiman et al., 2015, "Lazier than lazy greedy")."""
    state, random = _State(similarities, counts, goal), np.random.default_rng(seed)
    sample = math.ceil(int(state.open.sum()) / goal.size * math.log(1.0 / LOSS))

    def some() -> Tensor:
        left = state.open.nonzero().flatten()
        drawn = random.choice(len(left), min(sample, len(left)), replace=False)
        return left[torch.from_numpy(np.sort(drawn)).to(left.device)]

    return _scan(state, some, goal, advance)


GREEDY = {"lazy": lazy_greedy, "naive": naive_greedy, "stochastic": stochastic_greedy}


def _scan(state: "_State", candidates: Callable[[], Tensor], goal: Goal, advance: Advance) -> Picks:
    """Picks the best of `candidates()` each time."""
    while not state.reached(goal):
        looked_at = candidates()
        gains = torch.full_like(state.best, -math.inf)
        gains[looked_at] = state.gains(looked_at)
        winner = state.first_of_best(looked_at, gains)
        state.pick(winner, float(gains[winner]))
        advance(1)
    return state.picks


class _State:
    """The picks so far, and each point's largest similarity to them."""

    def __init__(self, similarities: Similarities, counts: Tensor, goal: Goal) -> None:
        self.similarities, self.counts = similarities, counts
        self.best = torch.zeros_like(counts)  # before any pick: F of nothing is 0
        everyone = torch.ones(len(counts), dtype=torch.bool, device=counts.device)
        self.open = everyone if goal.among is None else goal.among.clone()  # to further picks
        self.picks = Picks([], [])
        self.value = 0.0
        self.refreshed = 0  # gains that the last pick computed, or half the previous number

    def gains(self, candidates: Tensor) -> Tensor:
        """Computes what each of some candidates [b] would add to F."""
        gains = []
        for block in candidates.split(self.similarities.block):
            rows = self.similarities.rows(block)
            if self.picks.order:
                rows.sub_(self.best).clamp_(min=0.0)
            gains.append(rows @ self.counts)
        return torch.cat(gains)

    def refresh_(self, bounds: Tensor) -> int:
        """Computes the largest bounds of gains again, until no other can win or tie; returns the
        lowest candidate of the best."""
        stale, best, fresh, refresh = bounds.clone(), -math.inf, [], FIRST_REFRESH
        while True:
            top, candidates = stale.topk(min(refresh, len(stale)))
            candidates = candidates[(top >= self.tying(best)) & (top > -math.inf)]
            if not len(candidates):
                break
            gains = self.gains(candidates)
            bounds[candidates], stale[candidates] = gains, -math.inf
            fresh.append(candidates)
            best, refresh = max(best, float(gains.max())), 2 * refresh
        self.refreshed = max(self.refreshed // 2, sum(map(len, fresh)))
        return self.first_of_best(torch.cat(fresh), bounds)

    def tying(self, best: float) -> float:
        """The least gain that is as good as the best."""
        return best - TIES * torch.finfo(self.best.dtype).eps * abs(best)

    def first_of_best(self, candidates: Tensor, gains: Tensor) -> int:
        """The lowest of some candidates among the best; `gains` are of all [n]."""
        of_them = gains[candidates]
        return int(candidates[of_them >= self.tying(float(of_them.max()))].min())

    def lower_(self, bounds: Tensor, previous_best: Tensor) -> None:
        """Lowers bounds of gains by what the last pick took away.

        Reads a row of similarities for each point whose best rose above `previous_best` [n], as
        s_ij = s_ji. Does nothing where these points are more than the gains that the pick
        refreshed: then refreshing costs less.
        """
        changed = (self.best > previous_best).nonzero().flatten()
        if len(changed) > self.refreshed:
            return
        slack = self._slack(bounds)
        for some in changed.split(self.similarities.block):
            low, high = previous_best[some][:, None], self.best[some][:, None]
            bounds -= self.counts[some] @ self.similarities.rows(some).clamp_(low, high).sub_(low)
        bounds += slack

    def _slack(self, bounds: Tensor) -> Tensor:
        """Bounds the rounding of sums in lowered bounds [n]."""
        return TIES * torch.finfo(bounds.dtype).eps * bounds.clamp(min=0.0)

    def pick(self, candidate: int, gain: float) -> Tensor:
        """Adds a candidate with its gain; returns each point's previous best similarity [n]."""
        row = self.similarities.rows(torch.tensor([candidate], device=self.best.device))[0]
        previous_best, self.best = self.best, torch.maximum(self.best, row)
        self.open[candidate] = False
        self.picks.order.append(candidate)
        self.picks.gains.append(gain)
        self.value += gain
        return previous_best

    def reached(self, goal: Goal) -> bool:
        """Whether picks end here."""
        done = len(self.picks.order) >= goal.size or not self.open.any()
        return done or self.value >= goal.value


class _MatrixState(_State):
    """The state over a matrix in a CPU's memory: compiled loops read each row once without copies,
    so lowering all bounds at every pick costs least."""

    similarities: MatrixSimilarities

    def gains(self, candidates: Tensor) -> Tensor:
        """Computes gains; before the first pick all of them, as sums of rows."""
        if self.picks.order or len(candidates) < len(self.counts):
            return super().gains(candidates)
        bounds = torch.zeros_like(self.counts)
        everyone = np.arange(len(bounds))
        high = torch.full_like(self.best, torch.inf)
        self._take(bounds, everyone, self.best, high)
        return bounds.neg_()

    def refresh_(self, bounds: Tensor) -> int:
        """Computes the gains of the largest bound and of its ties; returns the lowest candidate.

        Bounds are exact here but for rounding.
        """
        first = bounds.argmax()
        bounds[first] = self.gains(first[None])[0]
        tied = (bounds >= self.tying(float(bounds[first]))).nonzero().flatten()
        if len(tied) > 1:
            bounds[tied] = self.gains(tied)
        return self.first_of_best(tied, bounds)

    def lower_(self, bounds: Tensor, previous_best: Tensor) -> None:
        """Lowers all bounds."""
        changed = (self.best > previous_best).nonzero().flatten()
        slack = self._slack(bounds)
        self._take(bounds, changed.numpy(), previous_best, self.best)
        bounds += slack

    def _take(
        self, bounds: Tensor, changed: np.ndarray, previous_best: Tensor, best: Tensor
    ) -> None:
        from mtcli.core.select import matrix_loops  # whose import takes a quarter of a second

        points = previous_best.numpy(), best.numpy(), self.counts.numpy()
        matrix_loops.take(self.similarities.matrix.numpy(), changed, *points, bounds.numpy())


def _state(similarities: Similarities, counts: Tensor, goal: Goal) -> _State:
    if isinstance(similarities, MatrixSimilarities) and counts.device.type == "cpu":
        return _MatrixState(similarities, counts, goal)
    return _State(similarities, counts, goal)
