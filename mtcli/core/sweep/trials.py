"""The trials of a sweep: configs that differ in the fields that are varied, and which of them one
array can train together. Imports no torch.

What is varied is fusible where it changes no shape, number of launches or order of steps: learning
rates, decays, dropout, initialisation, seeds. All else partitions the trials (HFTA,
arXiv:2102.02344, section 4).
"""

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.fields import field_kind, section_at
from mtcli.core.config.loading import (
    MAX_PROBLEMS,
    Table,
    all_fields,
    table_of,
    validate,
    with_overrides,
)
from mtcli.core.config.lora import adapts_experts
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.synonyms import meant_fields
from mtcli.core.sweep.rules import require_array

FUSIBLE = {
    "seed",
    "data.seed",
    *(f"model.{name}" for name in ("dropout", "attention_dropout", "init_std")),
    *(f"optimizer.{name}" for name in ("lr", "min_lr", "betas", "eps", "weight_decay", "clip")),
    *(f"optimizer.{name}" for name in ("schedule", "warmup_steps", "decay_steps")),
    *(f"optimizer.{name}" for name in ("momentum", "nesterov", "trust_bounds")),
    *(f"lora.{name}" for name in ("rank", "alpha", "dropout")),
    *(f"train.{name}" for name in ("loss_scale", "initial_loss_scale", "loss_scale_window")),
    *(f"train.{name}" for name in ("loss_scale_hysteresis", "on_nonfinite", "output")),
}
NONE_OR_SOME = ("optimizer.momentum", "lora.rank")  # 0 is other memory than any, not how much
# Fields of the processes, which all trials share.
OF_PROCESSES = ("train.device", "train.matmul", "train.timeout", "train.debug_collectives")
MOST_TRIALS = 10_000
LONGEST_NAME = 120  # letters of a trial's folder
SIGNIFICANT = 4  # digits of values that are drawn


class Range(NamedTuple):
    """Numbers from `low` to `high`, drawn evenly by their logarithm where both are above 0 and a
    factor of 10 apart."""

    low: float
    high: float
    whole: bool

    def draw(self, source: random.Random) -> float | int:
        """A number of the range."""
        return self.at(source.random())

    @property
    def logarithmic(self) -> bool:
        """Whether logarithms are drawn evenly."""
        return self.low > 0.0 and self.high >= 10.0 * self.low

    def at(self, share: float) -> float | int:
        """The number at a share of the way from `low` to `high`."""
        if self.logarithmic:
            number = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        else:
            number = self.low + share * (self.high - self.low)
        return self.rounded(number)

    def rounded(self, number: float) -> float | int:
        """A number as trials have it: to four digits, and within the range."""
        if self.whole:
            return round(min(max(number, self.low), self.high))
        return min(max(float(f"{number:.{SIGNIFICANT}g}"), self.low), self.high)


class Varied(NamedTuple):
    """A field and the values that it takes in turn, or the range that they are drawn from."""

    field: str
    values: tuple[Any, ...]
    range: Range | None = None


class Trial(NamedTuple):
    """A config of a sweep, by the name of its run folder."""

    name: str
    values: Mapping[str, Any]  # of the varied fields
    config: RunConfig


class Budget(NamedTuple):
    """The number of trials to draw (0: all of a grid), and of seeds for each (0: the config's)."""

    drawn: int = 0
    seeds: int = 0


class SweepSpace:
    """A base config, the fields that are varied, and where the run folders are."""

    def __init__(self, source: str | Table, overrides: Sequence[str], output: Path) -> None:
        self.output = output
        self.table = with_overrides(
            table_of(source, overrides), [f"train.output={json.dumps(str(output))}"]
        )
        base, self.problems = validate(self.table)
        if base is None:
            raise MtcliError(*self.problems)
        self.base = base

    def read(self, items: Sequence[str], draws: bool = True) -> list[Varied]:
        """The fields and values of --vary. Raises MtcliError with all that are unknown or illegal,
        each with the nearest legal one; ranges are illegal unless it `draws` from them."""
        varied = collect_errors(*(partial(self._varied, item, draws) for item in items))
        names = [option.field for option in varied]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            hint = f"give its values at once: --vary {twice[0]}=A,B"
            raise wrong(f"{', '.join(twice)} is varied twice", hint, "--vary")
        return varied

    def points(self, varied: Sequence[Varied], budget: Budget) -> list[dict[str, Any]]:
        """The values of the varied fields of each trial."""
        source = random.Random(self.base.seed)
        grid = math.prod(len(option.values) for option in varied if option.range is None)
        count = budget.drawn or grid
        if count * max(1, budget.seeds) > MOST_TRIALS:
            message = f"{count * max(1, budget.seeds):,} trials, of {MOST_TRIALS:,} at most"
            raise wrong(message, "vary fewer values, or --random N", "--vary")
        if any(option.range for option in varied):
            chosen = [_drawn(varied, source) for _ in range(count)]
        else:
            numbers: Sequence[int] = range(grid)
            if budget.drawn and budget.drawn < grid:
                numbers = source.sample(numbers, budget.drawn)
            chosen = [_grid_point(varied, number) for number in numbers]
        if not budget.seeds:
            return chosen
        seeds = range(self.base.seed, self.base.seed + budget.seeds)
        return [{**point, "seed": seed} for point in chosen for seed in seeds]

    def checked(self, points: Sequence[Mapping[str, Any]], shared: bool, world: int) -> list[Trial]:
        """Makes the trials of these values. Raises MtcliError with all wrong values."""
        fields = list(dict.fromkeys(field for point in points for field in point))
        short = short_names(fields)
        named = {trial_name(point, short): point for point in points}
        makers = [partial(self._trial, name, point, shared, world) for name, point in named.items()]
        try:
            return collect_errors(*makers)
        except MtcliError as error:
            if (more := len(error.problems) - MAX_PROBLEMS) <= 0:
                raise
            first = error.problems[:MAX_PROBLEMS]
            last = Problem(f"{more:,} more values are wrong")
            raise MtcliError(*first, last, hint=error.hint) from None

    def is_legal(self, field: str, word: str) -> bool:
        """Whether a field takes the value of a word."""
        try:
            self._value(field, word)
        except MtcliError:
            return False
        return True

    def _trial(self, name: str, point: Mapping[str, Any], shared: bool, world: int) -> Trial:
        table = self.table
        if shared and self.base.data.seed is None:
            table = with_overrides(table, [f"data.seed={self.base.seed}"])
        values = {**point, "train.output": str(self.output / name)}
        for field, value in values.items():
            table = _with_value(table, field.split("."), value)
        config, problems = validate(table)
        legal = require_array(config, problems, world)
        return Trial(name, {field: attrgetter(field)(legal) for field in point}, legal)

    def _varied(self, item: str, draws: bool) -> Varied:
        field, equals, text = item.partition("=")
        field, words = field.strip(), split_values(text)
        if not equals or not all(words):
            hint = "write --vary section.field=A,B such as --vary optimizer.lr=1e-3,3e-4"
            raise wrong(f"--vary {item!r} names no field and values", hint, "--vary")
        self._require_field(field)
        if len(words) == 1 and (bounds := self._range(field, words[0])):
            if not draws:
                hint = "--random N draws from it; or list values, as in 1e-4,1e-3"
                raise wrong(f"{field} has a range, of which there is no grid", hint, "--vary")
            return Varied(field, (), bounds)
        values = collect_errors(*(partial(self._value, field, word) for word in words))
        unique: list[Any] = []
        for value in values:
            if value not in unique:
                unique.append(value)
        return Varied(field, tuple(unique))

    def _require_field(self, field: str) -> None:
        fields = all_fields()
        if field == "train.output":
            raise wrong("each trial has a folder of its own in --output", "", "--vary train.output")
        if field in OF_PROCESSES:
            hint = f"--set {field}=VALUE, and a sweep for each"
            raise wrong(
                "it is of the processes, and all trials share these", hint, f"--vary {field}"
            )
        if field in fields:
            return
        section, _, name = field.rpartition(".")
        section_names = [
            path.rpartition(".")[2] for path in fields if path.rpartition(".")[0] == section
        ]
        near = [
            n if "." in n else f"{section}.{n}" for n in meant_fields(name, section_names, fields)
        ]
        matches = [path for path in near if path in fields]
        hint = (
            f"did you mean {matches[0]}?"
            if matches
            else "docs/reference/config.md lists the fields"
        )
        raise wrong(f"there is no field {field!r}", hint, "--vary")

    def _value(self, field: str, word: str) -> Any:
        """The value of a word. Raises MtcliError where it is illegal, with a legal one."""
        table = with_overrides(self.table, [f"{field}={word}"], "--vary")
        config, problems = validate(table)
        base_fields = {problem.field for problem in self.problems}
        new_problems = [p for p in problems if p.field not in base_fields]
        if new_problems:
            raise MtcliError(*(p._replace(field=f"--vary {p.field}") for p in new_problems))
        if config is None:
            raise MtcliError(*problems)
        return attrgetter(field)(config)

    def _range(self, field: str, word: str) -> Range | None:
        match = re.fullmatch(r"([-+.\deE]+)\.\.([-+.\deE]+)", word)
        if not match:
            return None
        *parents, name = field.split(".")
        section = section_at(RunConfig, parents)
        kind = field_kind(section.model_fields[name]).base if section else None
        if kind not in (int, float):
            raise wrong(
                f"{word} is a range, and it takes no number", "list values", f"--vary {field}"
            )
        low, high = collect_errors(*(partial(self._value, field, end) for end in match.groups()))
        if low >= high:
            hint = "LOW..HIGH, the lower number first"
            raise wrong(f"the range {word} is empty", hint, f"--vary {field}")
        return Range(low, high, kind is int)


def split_values(text: str) -> list[str]:
    """The words between the commas that stand in no brackets or quotes."""
    words, depth, quote, word = [], 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        if letter == "," and not depth and not quote:
            words.append(word.strip())
            word = ""
        else:
            word += letter
    return [*words, word.strip()]


def short_names(fields: Sequence[str]) -> dict[str, str]:
    """The last word of each field's name where no other has the same, else all of it."""
    last = [field.rpartition(".")[2] for field in fields]
    return {f: w if last.count(w) == 1 else f for f, w in zip(fields, last, strict=True)}


def trial_name(point: Mapping[str, Any], short: Mapping[str, str]) -> str:
    """The name of a trial by its values, as a folder may have it: `lr=0.001_clip=1.0`; with a hash
    of them where it is shortened, or lacks letters that no folder's name should have."""
    words = [f"{short[field]}={_shown(value)}" for field, value in point.items()]
    text = re.sub(r"(?<=[\d.]),(?=[-\d])", "-", "_".join(words)) or "trial"
    name = re.sub(r"[^a-zA-Z0-9_.=+-]", "-", text)[:LONGEST_NAME]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def name_of(point: Mapping[str, Any]) -> str:
    """The name of a trial by its values alone."""
    return trial_name(point, short_names(list(point)))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return ",".join(map(_shown, value)) if isinstance(value, list | tuple) else str(value)


def partitions(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials that one array could train, in the order of their first ones."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(_infusible(trial.config), []).append(trial)
    return list(groups.values())


def partitioning_fields(trials: Sequence[Trial], varied: Sequence[str]) -> list[str]:

    def parts(field: str) -> bool:
        return (
            field in NONE_OR_SOME and len({_has_any(trial.config, field) for trial in trials}) > 1
        )

    return [field for field in varied if field not in FUSIBLE or parts(field)]


def _has_any(config: RunConfig, field: str) -> bool | int:
    """Whether a field is above 0; the rank itself of experts' adapters, which have one in an
    array."""
    number = attrgetter(field)(config)
    has_experts = config.model.num_experts > 0 and adapts_experts(config.lora.targets)
    return int(number) if field == "lora.rank" and has_experts else bool(number)


def _infusible(config: RunConfig) -> str:
    """All of a config that models of one array share, as text."""
    flat = dict(_leaves(config.model_dump(mode="json")))
    shared = {field: value for field, value in flat.items() if field not in FUSIBLE}
    return json.dumps(
        [shared, *(_has_any(config, field) for field in NONE_OR_SOME)], sort_keys=True
    )


def _leaves(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and path.count(".") < 1:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _drawn(varied: Sequence[Varied], source: random.Random) -> dict[str, Any]:
    return {
        option.field: option.range.draw(source) if option.range else source.choice(option.values)
        for option in varied
    }


def _grid_point(varied: Sequence[Varied], number: int) -> dict[str, Any]:
    """Point `number` of the grid, whose last field goes through its values quickest."""
    point = {}
    for option in reversed(varied):
        number, index = divmod(number, len(option.values))
        point[option.field] = option.values[index]
    return {option.field: point[option.field] for option in varied}


def _with_value(table: Table, keys: Sequence[str], value: Any) -> Table:
    if len(keys) > 1:
        value = _with_value(table.get(keys[0], {}), keys[1:], value)
    return table | {keys[0]: list(value) if isinstance(value, tuple) else value}
