"""Adds up a run from a planned step: days, GPU-hours, money and energy, with their ranges.

The time is that of steps, evaluations, saves and failures. Energy is that of boards at their power
limit, which training keeps them close to, times the building's share; hosts and switches are not in
it.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mtcli.core.config.schema import TrainConfig
from mtcli.core.plan.certainty import step_range
from mtcli.core.plan.hardware import gib
from mtcli.core.plan.interruptions import (
    DAY,
    MINUTE,
    Assumed,
    Interruptions,
    interruptions,
)
from mtcli.core.plan.predict import Prediction

Goal = Literal["time", "money", "energy"]  # what a search minimises

HOUR = 3600.0


class PhasePlan(NamedTuple):
    """The cost of a step of a phase, of which the run makes `steps`."""

    number: int  # 0: the run's own tables
    steps: float
    prediction: Prediction

    @property
    def tokens(self) -> float:
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


class RunTotals(NamedTuple):
    """The tokens of a run and how it saves, the price of an hour of one device in any currency,
    and what is assumed of its cluster."""

    tokens: float
    price: float | None = None
    train: TrainConfig = TrainConfig()
    assumed: Assumed = Assumed()
    phases: tuple[PhasePlan, ...] = ()  # those of `tokens`; none where the run is one

    def phases_by(self, p: Prediction) -> tuple[PhasePlan, ...]:
        """The phases, or all steps as one."""
        return self.phases or (PhasePlan(0, self.tokens / p.work.tokens_per_step, p),)

    def steps(self, p: Prediction) -> float:
        """The number of steps."""
        return sum(one.steps for one in self.phases_by(p))

    def interrupted(self, p: Prediction, step: float) -> Interruptions:
        """The cost of saves and failures where a step that p predicts takes some seconds, and those
        of phases as much longer than predicted."""
        train, phases, evaluating = self.train, self.phases_by(p), 0.0
        training = sum(one.seconds for one in phases) * (step / p.step_seconds)
        if train.eval_every:
            batches = sum(one.steps * one.prediction.evaluation_seconds for one in phases)
            evaluating = train.eval_batches * batches / train.eval_every
        mean = training / self.steps(p)
        return interruptions(p, train, mean, training + evaluating, self.assumed)


def budget_of(p: Prediction, budget: RunTotals) -> dict[str, Any]:
    """The figures of a run. `days`, `gpu_hours`, `money` and `kwh` are {planned, low, high}, by the
    seconds of `step_range`, or null where they are not known or a run never ends."""
    spread, assumed = step_range(p), budget.assumed
    planned = budget.interrupted(p, p.step_seconds)
    walls = {"planned": finite(planned.wall), "low": None, "high": None}
    if spread:
        ends = {"low": spread.low, "high": spread.high}
        walls |= {name: finite(budget.interrupted(p, s).wall) for name, s in ends.items()}

    def times(factor: float | None) -> dict[str, float | None] | None:
        if not factor:
            return None
        return {name: s and s * factor for name, s in walls.items()}

    hours = p.work.layout.world / HOUR
    return {
        "tokens": budget.tokens,
        "steps": budget.steps(p),
        "price": budget.price,
        "days": times(1 / DAY),
        "gpu_hours": times(hours),
        "money": times(budget.price and hours * budget.price),
        "kwh": times(hours * p.device.watts / 1e3 * assumed.pue),
        "checkpoints": {
            "bytes": planned.bytes,
            "count": planned.saves,
            "every_seconds": planned.interval,
            "stall_seconds": planned.stall,
            "write_seconds": planned.write,
            "read_seconds": planned.read,
            "all_stall_seconds": planned.saves * planned.stall,
            "all_write_seconds": planned.saves * planned.write,
        },
        "failures": {
            "per_day": DAY / planned.between_failures,
            "count": finite(planned.failures),
            "lost_seconds_each": planned.lost,
            "lost_seconds": finite(planned.failures * planned.lost),
        },
        "best_save": {"every_seconds": planned.best, "days": finite(planned.at_best / DAY)},
        "assumed": assumed._asdict(),
    }


def finite(value: float) -> float | None:
    """A number, or None where it is infinite or not one."""
    return value if abs(value) < float("inf") else None


def budget_rows(p: Prediction, budget: RunTotals) -> list[list[str]]:
    """Rows of the summary table on all steps of a run: name and value."""
    figures, assumed = budget_of(p, budget), budget.assumed
    energy = f"kWh: {p.device.watts:g} W a board, times {assumed.pue:g} for the building"
    names = {"days": "days", "gpu_hours": "GPU-hours", "kwh": energy}
    if budget.price:
        names["money"] = f"in money, at {budget.price:g} an hour"
    rows = [["all steps", f"{budget.tokens:.4g} tokens in {figures['steps']:,.0f} steps"]]
    for key, words in names.items():
        if (figure := figures[key]) and figure["planned"]:
            low, high = figure["low"], figure["high"]
            sure = f" ({_number(low)} to {_number(high)})" if low and high else ""
            rows.append(["", f"{_number(figure['planned'])} {words}{sure}"])
    return rows + _interruption_rows(budget.interrupted(p, p.step_seconds), assumed)


def _interruption_rows(run: Interruptions, assumed: Assumed) -> list[list[str]]:
    """Rows on checkpoints, failures, and how often to save."""
    writes = f"{_number(run.write)} s to write, {_number(run.saves * run.write / HOUR)} h in all"
    rows = [
        [
            "checkpoints",
            f"{run.saves:,} of {_size(run.bytes)}, every {_number(run.interval / 60)} min",
        ],
        [
            "",
            f"each: {_number(run.stall)} s without training; {writes}, at {assumed.storage:g} GB/s",
        ],
    ]
    if not (daily := DAY / run.between_failures):
        return rows
    rate = f"{assumed.failures:.2g} a day of 1,000 devices"
    best = f"train.save_minutes={_number(run.best / MINUTE)}"
    if (expected := finite(run.failures)) is None:
        cure = f"; it would with {best}" if finite(run.at_best) else ""
        short = f"one in {_number(run.between_failures / MINUTE)} min, each costs more than that"
        return [*rows, ["failures", f"{short}: the run never ends{cure}, at {rate}"]]
    share, restart = expected * run.lost / run.wall, f"{assumed.restart:g} min to restart"
    parts = f"half an interval, a write, {restart}, {_number(run.read)} s to read"
    rows += [
        ["failures", f"{_number(daily)} a day, {expected:,.0f} in all, at {rate}"],
        ["", f"each: {_number(run.lost / MINUTE)} min, {share:.1%} of the run: {parts}"],
        ["best interval", f"{best} (Young), {1 - run.at_best / run.wall:.1%} less time"],
    ]
    return rows


def duration_words(seconds: float) -> str:
    """Words a time in the largest unit of which it has two."""
    for unit, size in (("days", DAY), ("hours", HOUR)):
        if seconds >= 2 * size:
            return f"{_number(seconds / size)} {unit}"
    return f"{_number(seconds / MINUTE)} min"


def _size(count: float) -> str:
    """Bytes in powers of 1,000, as file systems are sold."""
    power = min(4, max(1, (len(str(int(count))) - 1) // 3))
    return f"{_number(count / 1000**power)} {' kMGT'[power]}B"


def _number(value: float) -> str:
    """Three digits of a number below 1,000, and all of a larger one."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
