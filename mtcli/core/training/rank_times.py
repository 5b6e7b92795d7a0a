"""How long each rank computes and waits for others: who holds the others up.

A rank that is slow waits little, and all others wait for it. Waits are those of the flight
recorder: of a CPU rank the time in its collectives, of a GPU that of its stream.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis, Groups


class RankTimes(NamedTuple):
    """Seconds of a step, as the mean over some steps."""

    computing: list[float]  # by rank
    waiting: list[float]

    def row(self) -> dict[str, float]:
        """What metrics tell: the largest and the median of each, and whose the largest is."""
        row: dict[str, float] = {}
        for kind, seconds in self._asdict().items():
            row[f"{kind}_seconds_max"] = most = max(seconds)
            row[f"{kind}_seconds_median"] = median(seconds)
            row[f"{kind}_rank_max"] = seconds.index(most)
        return row


class StepTimer:
    """Sums up this rank's steps until they are told."""

    def __init__(self, world: Axis) -> None:
        self.recorder, self.rank, self.world = world.recorder, world.rank, world.size
        self.computing = self.waiting = 0.0
        self.steps = 0

    def begin(self) -> None:
        """Begins a step: what was waited for since the last one is of none."""
        self.recorder.take_waited()

    def end(self, seconds: float) -> None:
        """Ends a step that took so long."""
        waited = min(self.recorder.take_waited(), seconds)
        self.computing += seconds - waited
        self.waiting += waited
        self.steps += 1

    def taken(self) -> list[float]:
        """A term of the sum over ranks that tells all ranks' seconds: 2 * world numbers."""
        terms = [0.0] * (2 * self.world)
        steps = max(1, self.steps)
        terms[self.rank], terms[self.world + self.rank] = (
            self.computing / steps,
            self.waiting / steps,
        )
        self.computing = self.waiting = 0.0
        self.steps = 0
        return terms


def rank_times(sums: list[float]) -> RankTimes | None:
    """The seconds of all ranks, from the sum of what each has `taken`; None for one rank alone."""
    world = len(sums) // 2
    return RankTimes(sums[:world], sums[world:]) if world > 1 else None


def agreed(
    groups: Groups, stops: bool, saves: bool, sent: int, taken: Sequence[float] = ()
) -> tuple[bool, bool, int, RankTimes | None]:
    """Whether any rank stops, so that all leave the loop after the same step; whether rank 0 saves;
    the bytes that all ranks sent for data parallelism; and how long each took, where they tell.
    Collective."""
    decisions = float(stops), float(saves and groups.world.rank == 0), float(sent)
    terms = torch.tensor([*decisions, *taken], dtype=torch.float64)
    stopped, saved, total, *of_ranks = all_reduce(terms.to(groups.device), groups.world).tolist()
    return stopped > 0.0, saved > 0.0, round(total), rank_times(of_ranks)
