"""Decides which models of a sweep go on: Hyperband's rungs, and the median rule. Imports no torch.

Both compare training losses at the same step, which the run folders hold; so a sweep that resumes
decides as it did.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

Losses = Sequence[float]  # of steps 1, 2, ...


class Rung(NamedTuple):
    """A rung of a bracket: `trials` of the bracket train until `step`."""

    trials: int
    step: int


class Hyperband(NamedTuple):
    """Hyperband's R (`units` of a whole run) and eta: 1 in eta trials of a rung goes on, to eta
    times as many units (arXiv:1603.06560, algorithm 1)."""

    units: int
    eta: int

    def brackets(self, steps: int) -> list[list[Rung]]:
        """The rungs of each bracket, for runs of `steps`; the bracket with most trials first."""
        depth = 0
        while self.eta ** (depth + 1) <= self.units:
            depth += 1
        brackets = []
        for s in range(depth, -1, -1):
            trials = -(-(depth + 1) * self.eta**s // (s + 1))
            rungs = [
                Rung(trials // self.eta**i, max(1, round(steps * self.eta ** (i - s))))
                for i in range(s + 1)
            ]
            brackets.append([rung for rung in rungs if rung.trials])
        return brackets

    def trials(self) -> int:
        """The trials of all brackets."""
        return sum(rungs[0].trials for rungs in self.brackets(self.units))


def best(losses: Mapping[str, Losses], step: int, count: int, window: int) -> list[str]:
    """The names of the `count` trials with the least mean loss over the last `window` steps before
    a step, best first; a trial that has no loss there is worse than any that has."""
    means = {name: mean_loss(run, step, window) for name, run in losses.items()}
    return sorted(means, key=lambda name: (means[name], name))[:count]


def mean_loss(losses: Losses, step: int, window: int) -> float:
    """The mean over steps step - window + 1 .. step; infinite where it has not got there."""
    if len(losses) < step:
        return math.inf
    part = losses[max(0, step - window) : step]
    total = math.fsum(part) / len(part)
    return total if math.isfinite(total) else math.inf


def below_median(losses: Mapping[str, Losses], step: int, window: int) -> list[str]:
    """The names of trials that the median rule stops at a step: their best mean of `window` steps
    is worse than the median of the others' means of all steps (Golovin et al., Vizier, KDD 2017,
    section 3.2.2)."""
    reached = {name: run for name, run in losses.items() if len(run) >= step}
    averages = {name: mean_loss(run, step, step) for name, run in reached.items()}
    stopped = []
    for name, run in reached.items():
        other_averages = [average for other, average in averages.items() if other != name]
        best_mean = min(mean_loss(run, end, window) for end in range(window, step + 1, window))
        if other_averages and best_mean > median(other_averages):
            stopped.append(name)
    return stopped
