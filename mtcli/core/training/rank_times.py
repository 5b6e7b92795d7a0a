"""Measures how long each rank computes and waits for others, which finds slow ranks.

A slow rank waits little, and all others wait for it. The flight recorder measures waits: on a CPU
the time in collectives, on a GPU that of their stream.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
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
        """The keys of metrics.jsonl: largest and median seconds by kind, and the largest's rank."""
        row: dict[str, float] = {}
        for kind, seconds in self._asdict().items():
            row[f"{kind}_seconds_max"] = most = max(seconds)
            row[f"{kind}_seconds_median"] = median(seconds)
            row[f"{kind}_rank_max"] = seconds.index(most)
        return row


class StepTimer:
    """Sums this rank's seconds over steps until they are `taken`."""

    def __init__(self, world: Axis) -> None:
        self.recorder, self.rank, self.world = world.recorder, world.rank, world.size
        self.computing = self.waiting = 0.0
        self.steps = 0

    def begin(self) -> None:
        """Begins a step; waits since the last one do not count."""
        self.recorder.take_waited()

    def end(self, seconds: float) -> None:
        """Ends a step that took `seconds`."""
        waited = min(self.recorder.take_waited(), seconds)
        self.computing += seconds - waited
        self.waiting += waited
        self.steps += 1

    def taken(self) -> list[float]:
        """This rank's term of a sum over ranks that has all ranks' seconds: 2 * world numbers."""
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
    """The seconds of all ranks, from the sum of all ranks' `taken`; None for one rank alone."""
    world = len(sums) // 2
    return RankTimes(sums[:world], sums[world:]) if world > 1 else None


def agreed(
    groups: Groups, stops: bool, saves: bool, sent: int, taken: Sequence[float] = ()
) -> tuple[bool, bool, int, RankTimes | None]:
    """(whether any rank stops, whether rank 0 saves, the bytes that all ranks sent for data
    parallelism, all ranks' seconds where `taken`), by one all-reduce. Collective.

    So all ranks leave the loop, or save, after the same step.
    """
    decisions = float(stops), float(saves and groups.world.rank == 0), float(sent)
    terms = torch.tensor([*decisions, *taken], dtype=torch.float64)
    if groups.world.size > 1:  # one rank alone asks its GPU for nothing
        with _ahead_of_the_queue(groups.device):
            terms = all_reduce(terms.to(groups.device), groups.world).cpu()
    stopped, saved, total, *of_ranks = terms.tolist()
    return stopped > 0.0, saved > 0.0, round(total), rank_times(of_ranks)


def _ahead_of_the_queue(device: torch.device) -> AbstractContextManager[object]:
    """The context of what waits for nothing that a GPU has yet to do: the update of the weights,
    and their gathers."""
    return torch.cuda.stream(_side_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
