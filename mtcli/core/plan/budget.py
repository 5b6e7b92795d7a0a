"""Adds up a run from a planned step: days, GPU-hours, money and energy, with their ranges.

Energy is that of boards at their power limit, which training keeps them close to; hosts, switches
and cooling are not in it. Saves, restarts and evaluations are not in the time.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mtcli.core.plan.certainty import step_range
from mtcli.core.plan.hardware import gib
from mtcli.core.plan.predict import Prediction

Goal = Literal["time", "money", "energy"]  # what a search minimises

HOUR, DAY = 3600.0, 86400.0


class RunTotals(NamedTuple):
    """The tokens of a run, and the price of an hour of one device, in any currency."""

    tokens: float
    price: float | None = None
    phases: tuple["PhasePlan", ...] = ()


class PhasePlan(NamedTuple):
    """The cost of a step of a phase, of which the run makes `steps`."""

    number: int  # 0: the run's own tables
    steps: int
    prediction: Prediction

    @property
    def tokens(self) -> int:
        """The tokens of the phase."""
        return self.steps * self.prediction.work.tokens_per_step

    @property
    def seconds(self) -> float:
        """The seconds of its steps."""
        return self.steps * self.prediction.step_seconds

    def as_json(self) -> dict[str, Any]:
        """The figures of the phase for `plan --json`."""
        return {
            "phase": self.number,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "step_seconds": self.prediction.step_seconds,
            "memory_bytes": round(self.prediction.memory.total),
            "fits": self.prediction.fits,
        }


PHASES = ("phase", "steps", "tokens", "batch", "bytes per rank", "s/step", "hours")


def phase_rows(phases: Sequence[PhasePlan]) -> list[list[str]]:
    """Rows of the table of phases, and of all of them; * marks the one with the most bytes."""
    fullest = max(phases, key=lambda one: one.prediction.memory.total)
    rows = []
    for one in phases:
        p, work = one.prediction, one.prediction.work
        memory = gib(p.memory.total) + " *" * (one is fullest)
        sizes = f"{work.global_batch_size:,} x {work.seq_len:,}"
        row = [str(one.number), f"{one.steps:,}", f"{one.tokens:,}", sizes, memory]
        rows.append([*row, f"{p.step_seconds:.4g}", f"{one.seconds / HOUR:.4g}"])
    steps, tokens, seconds = (
        sum(getattr(one, name) for one in phases) for name in ("steps", "tokens", "seconds")
    )
    most = gib(fullest.prediction.memory.total)
    rows.append(["all", f"{steps:,}", f"{tokens:,}", "", most, "", f"{seconds / HOUR:.4g}"])
    return rows


def budget_of(p: Prediction, budget: RunTotals) -> dict[str, Any]:
    """The figures of a run: {tokens, steps, price, days, gpu_hours, money, kwh}; the last four are
    {planned, low, high}, by the seconds of `step_range`, or null where they are not known."""
    spread, work = step_range(p), p.work
    seconds = {"planned": p.step_seconds, "low": None, "high": None}
    if spread:
        seconds |= {"low": spread.low, "high": spread.high}
    steps, longer = budget.tokens / work.tokens_per_step, 1.0
    if budget.phases:  # whose steps take the seconds of `longer` times as many of the first one's
        steps = sum(one.steps for one in budget.phases)
        longer = sum(one.seconds for one in budget.phases) / (steps * p.step_seconds)

    def times(factor: float | None) -> dict[str, float | None] | None:
        if not factor:
            return None
        return {name: s and s * steps * longer * factor for name, s in seconds.items()}

    hours = work.layout.world / HOUR
    return {
        "tokens": budget.tokens,
        "steps": steps,
        "price": budget.price,
        "days": times(1 / DAY),
        "gpu_hours": times(hours),
        "money": times(budget.price and hours * budget.price),
        "kwh": times(hours * p.device.watts / 1e3),
    }


def budget_rows(p: Prediction, budget: RunTotals) -> list[list[str]]:
    """Rows of the summary table on all steps of a run: name and value."""
    figures = budget_of(p, budget)
    names = {"days": "days", "gpu_hours": "GPU-hours", "kwh": "kWh of boards at their power limit"}
    if budget.price:
        names["money"] = f"in money, at {budget.price:g} an hour"
    rows = [["all steps", f"{budget.tokens:.4g} tokens in {figures['steps']:,.0f} steps"]]
    for key, words in names.items():
        if figure := figures[key]:
            low, high = figure["low"], figure["high"]
            sure = f" ({_number(low)} to {_number(high)})" if low and high else ""
            rows.append(["", f"{_number(figure['planned'])} {words}{sure}"])
    return rows


def _number(value: float) -> str:
    """Three digits of a number below 1,000, and all of a larger one."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
