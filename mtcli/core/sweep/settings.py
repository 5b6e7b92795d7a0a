"""Sums a sweep up: mean and spread of each setting over its seeds, and a best at a range's end."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from mtcli.core.sweep.record import TrialRecord
from mtcli.core.sweep.trials import Range, Varied, name_of

SEED = "seed"
NEAR = 0.1  # share of a range that is near its end
FURTHER = 2  # values that are proposed beyond the last one
COLUMNS = ("setting", "seeds", "mean loss", "std", "mean valid", "std", "not finished")


class SeedSpread(NamedTuple):
    """The mean of several numbers, and their standard deviation: None of a single one."""

    mean: float
    std: float | None

    @staticmethod
    def of(numbers: Sequence[float]) -> "SeedSpread | None":
        """The spread of numbers (divided by their count less 1); None where there are none."""
        std = stdev(numbers) if len(numbers) > 1 else None
        return SeedSpread(fmean(numbers), std) if numbers else None


class Setting(NamedTuple):
    """The trials that differ in their seeds alone."""

    values: Mapping[str, Any]  # of the varied fields but the seed
    records: Sequence[TrialRecord]

    @property
    def finished(self) -> list[TrialRecord]:
        """The trials whose losses count: those with all of their steps."""
        return [r for r in self.records if r.status == "finished" and math.isfinite(r.score)]

    @property
    def loss(self) -> SeedSpread | None:
        """The mean and spread of the trials' losses."""
        return SeedSpread.of([record.loss for record in self.finished])

    @property
    def valid_loss(self) -> SeedSpread | None:
        """The same of their validation losses, where each has one."""
        losses = [r.valid_loss for r in self.finished if r.valid_loss is not None]
        return SeedSpread.of(losses) if len(losses) == len(self.finished) else None

    @property
    def score(self) -> float:
        """The number that settings are compared by, as trials are; infinite where none finished."""
        spread = self.valid_loss or self.loss
        return spread.mean if spread else math.inf

    def as_json(self) -> dict[str, Any]:
        """The setting as sweep.json has it."""
        spreads = {"loss": self.loss, "valid_loss": self.valid_loss}
        found = {name: spread and spread._asdict() for name, spread in spreads.items()}
        counts = {"seeds": len(self.records), "finished": len(self.finished)}
        return {"name": name_of(self.values), "values": dict(self.values), **counts, **found}

    def row(self) -> list[str]:
        """The setting as a row of COLUMNS."""
        cells = [name_of(self.values), str(len(self.finished))]
        for spread in (self.loss, self.valid_loss):
            numbers = spread or (None, None)
            cells += ["" if number is None else f"{number:.4f}" for number in numbers]
        missing = len(self.records) - len(self.finished)
        return [*cells, str(missing) if missing else ""]


def settings_of(records: Sequence[TrialRecord]) -> list[Setting]:
    """The settings of a sweep of several seeds, the best mean first; none of another sweep."""
    if len({record.trial.values.get(SEED) for record in records}) < 2:
        return []
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        values = {f: v for f, v in record.trial.values.items() if f != SEED}
        groups.setdefault(repr(values), []).append(record)
    settings = [
        Setting({f: v for f, v in group[0].trial.values.items() if f != SEED}, group)
        for group in groups.values()
    ]
    return sorted(settings, key=lambda setting: setting.score)


class AtEnd(NamedTuple):
    """A field whose best value is the first or last of those that were tried."""

    field: str
    value: float
    end: str  # lowest or highest
    words: str  # for --vary: what to try next
    goes_on: bool  # with --resume, as the words have all values that were tried

    def __str__(self) -> str:
        again = " --resume" if self.goes_on else " in another folder"
        place = f"the {self.end} of those tried" if self.goes_on else f"near the {self.end}"
        return (
            f"note: the best {self.field}, {self.value:g}, is {place}: "
            f"try --vary {self.field}={self.words}{again}"
        )


def at_ends(
    records: Sequence[TrialRecord],
    varied: Sequence[Varied],
    drawn: bool,
    legal: Callable[[str, str], bool],
) -> list[AtEnd]:
    """The fields whose best value is at an end, once all trials have ended, with what to try next
    where `legal(field, word)` says so. Values of a grid are tried again with --resume; trials that
    were `drawn` are others then."""
    finished = [record for record in records if record.status == "finished"]
    if not finished or not all(record.ended for record in records):
        return []
    settings = settings_of(records)
    best = settings[0].values if settings else min(finished, key=lambda r: r.order).trial.values
    found = []
    for field, values, limits in varied:
        value = best.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        words = _around(limits, value) if limits else _beyond(values, value)
        if words and all(legal(field, word) for word in words[1]):
            end, tried = words
            text = "..".join(tried) if limits else ",".join(tried)
            found.append(AtEnd(field, value, end, text, not (limits or drawn)))
    return found


def _beyond(values: Sequence[Any], best: float) -> tuple[str, list[str]] | None:
    """(the end that the best value is, all values and those beyond it)."""
    order = sorted(values)
    if len(order) < 2 or best not in (order[0], order[-1]):
        return None
    end, inner = (order[-1], order[-2]) if best == order[-1] else (order[0], order[1])
    decades = order[0] > 0 and max(end / inner, inner / end) >= 1.5
    steps = range(1, FURTHER + 1)
    further = [end * (end / inner) ** k if decades else end + k * (end - inner) for k in steps]
    whole = all(isinstance(value, int) for value in values)
    further = [round(x) if whole else float(f"{x:.3g}") for x in further]
    shown = [f"{value:g}" for value in sorted({*order, *further})]
    return ("highest" if best == order[-1] else "lowest"), shown


def _around(limits: Range, best: float) -> tuple[str, list[str]] | None:
    """(the end that the best value is near, the ends of the range of the same width around it)."""
    low, high = limits.low, limits.high
    if limits.logarithmic:
        share, middle = math.log(best / low) / math.log(high / low), math.sqrt(low * high)
        ends = (middle, high * high / middle) if share > 0.5 else (low * low / middle, middle)
    else:
        share, middle = (best - low) / (high - low), (low + high) / 2
        ends = (middle, 2 * high - middle) if share > 0.5 else (2 * low - middle, middle)
    if NEAR < share < 1 - NEAR:
        return None
    numbers = [round(x) if limits.whole else float(f"{x:.3g}") for x in ends]
    return ("highest" if share > 0.5 else "lowest"), [f"{number:g}" for number in numbers]
