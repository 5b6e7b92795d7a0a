"""Reads a sweep's command line into a plan, and refuses what cannot be run. Imports no torch."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.checkpoint.fine_tuning import require_weights, source_of, starting_tokenizer
from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.loader import require_data
from mtcli.core.data.subset import require_subset
from mtcli.core.data.vocabulary import with_vocabulary
from mtcli.core.runtime.atomic_writes import folder_of, make_folder
from mtcli.core.runtime.progress import write_line
from mtcli.core.sweep.rules import require_array
from mtcli.core.sweep.sampling import SamplingPlan, read_sampler
from mtcli.core.sweep.stopping import Hyperband
from mtcli.core.sweep.trials import (
    Budget,
    SweepSpace,
    Trial,
    Varied,
    partitioning_fields,
    partitions,
)
from mtcli.core.training.run_config import with_data_steps, with_texts
from mtcli.core.training.run_tokenizer import new_ids


class SweepRequest(NamedTuple):
    """The command line of `mtcli sweep`."""

    config: str | None
    overrides: list[str]
    output: Path
    vary: Sequence[str] = ()
    random: int | None = None
    seeds: int | None = None
    shared_batches: bool = False
    hyperband: str | None = None
    median: int | None = None
    max_fused: int | None = None  # None: as many models to an array as memory allows
    resume: bool = False
    sampler: str | None = None
    init: str | None = None
    base: str | None = None  # of the adapters of `init`, where it has moved

    @property
    def varied_fields(self) -> list[str]:
        """The fields of --vary, which may be unknown ones."""
        return [item.partition("=")[0].strip() for item in self.vary]

    def flags(self) -> dict[str, Any]:
        """The flags by name that sweep.json keeps."""
        kept_elsewhere = ("config", "overrides", "output")
        return {name: v for name, v in self._asdict().items() if name not in kept_elsewhere}


class SweepPlan(NamedTuple):
    """The trials of a sweep, and how they are trained."""

    request: SweepRequest
    trials: list[Trial]
    hyperband: Hyperband | None
    space: SweepSpace
    sampling: SamplingPlan | None  # of a sampler, which proposes trials later; `trials` has one
    fields: tuple[str, ...]  # that are varied
    varied: tuple[Varied, ...]  # of --vary

    @property
    def output(self) -> Path:
        """The sweep's folder, with those of its trials."""
        return self.request.output

    @property
    def draws(self) -> bool:
        """Whether trials are drawn, from lists too."""
        return bool(self.request.random or self.sampling)


def sweep_plan(request: SweepRequest, world: int) -> SweepPlan:
    """The plan of a command line on `world` ranks.

    Raises MtcliError with all that is wrong: unknown fields and values, configs that no array
    trains, and data that is not there.
    """
    flags = (
        lambda: read_sampler(request.sampler),
        lambda: read_hyperband(request.hyperband),
        lambda: _require_flags(request),
    )

    def space_of() -> SweepSpace:
        source = source_of(request.config, request.init, request.base)
        flags, _ = with_texts(
            source, request.overrides, world, write_line, config_name=request.config
        )
        return SweepSpace(
            source, with_vocabulary(source, flags, starting_tokenizer), request.output
        )

    (space,) = collect_errors(
        space_of,
        otherwise=lambda: collect_errors(*flags),
    )
    draws = bool(request.random or request.hyperband)
    sampler, rule, _, varied = collect_errors(
        *flags,
        lambda: space.read(request.vary, draws),
        otherwise=lambda: _require_base(space, request, world),
    )
    ranges = any(option.range for option in varied)
    drawn = request.random or (rule.trials() if rule and ranges else 0)
    sampling = None
    if sampler:
        assert request.random, "a sampler needs --random"
        sampling = SamplingPlan(sampler, varied, request.random, space.base.seed)
        drawn = 1
    points = space.points(varied, Budget(drawn, request.seeds or 0))
    trials = planned(space.checked(points, request.shared_batches, world), request.resume)
    _require_rules(trials, rule, request.median)
    with folder_of("--output", request.output):
        make_folder(request.output.absolute())
    fields = tuple(dict.fromkeys(field for point in points for field in point))
    return SweepPlan(request, trials, rule, space, sampling, fields, tuple(varied))


def planned(trials: Sequence[Trial], resume: bool) -> list[Trial]:
    """The trials, with train.steps from their epochs. Raises MtcliError for wrong data and, unless
    they `resume`, wrong starting weights."""
    groups = partitions(trials)
    slowest = (max(group, key=lambda t: t.config.optimizer.warmup_steps) for group in groups)
    firsts = [partial(_planned, trial.config, resume) for trial in slowest]
    by_name = {}
    for group, config in zip(groups, collect_errors(*firsts), strict=True):
        for trial in group:
            train = trial.config.train.model_copy(update={"steps": config.train.steps})
            run = trial.config.model_copy(update={"train": train})
            by_name[trial.name] = trial._replace(config=run)
    return [by_name[trial.name] for trial in trials]


def _planned(config: RunConfig, resume: bool) -> RunConfig:
    """The config of an array's model with the steps of its epochs."""
    _require_start(config, resume)
    return with_data_steps(config)


def _require_start(config: RunConfig, resume: bool) -> None:
    checks = [
        require_data,
        require_subset,
        *([] if resume else [require_weights, new_ids]),
    ]
    collect_errors(*(partial(check, config) for check in checks))


def _require_base(space: SweepSpace, request: SweepRequest, world: int) -> None:
    """Raises MtcliError where the config is wrong in fields that are not varied."""
    try:
        collect_errors(
            lambda: require_array(space.base, space.problems, world),
            lambda: _require_start(space.base, request.resume),
        )
    except MtcliError as error:
        if left := [p for p in error.problems if p.field not in request.varied_fields]:
            raise MtcliError(*left) from None


def plan_notes(plan: SweepPlan) -> list[str]:
    """Says which varied fields partition the trials, and into how many sets; and where there are
    fewer trials than were to be drawn."""
    if plan.sampling:  # whose trials are proposed as it goes on
        return []
    fields, sets = partitioning_fields(plan.trials, plan.fields), len(partitions(plan.trials))
    notes, count = [], len(plan.trials)
    asked = (plan.request.random or 0) * (plan.request.seeds or 1)
    if asked > count:
        notes += [f"{asked} trials are asked for, and {count} of them differ"]
    if fields:
        what = f"{', '.join(fields)} {'changes' if len(fields) == 1 else 'change'}"
        sets_text = f"{count} trials in {sets} sets, each an array or more of its own"
        notes += [f"{what} more than numbers: {sets_text}"]
    return notes


def read_hyperband(text: str | None) -> Hyperband | None:
    """The rule of --hyperband R,ETA."""
    if text is None:
        return None
    words = text.split(",")
    if len(words) == 2 and all(word.strip().isdecimal() for word in words):
        units, eta = map(int, words)
        if 1 <= units <= 10**6 and 2 <= eta <= 1000:
            return Hyperband(units, eta)
    hint = "R,ETA such as 81,3: R from 1 to 1000000 units of a run, ETA from 2 to 1000"
    raise wrong(f"{text!r} is no R,ETA", hint, "--hyperband")


def _require_flags(request: SweepRequest) -> None:
    """Raises MtcliError with the flags that contradict each other, or have no use."""
    fields, problems = request.varied_fields, []
    if request.hyperband and request.median:
        message = "Hyperband and the median rule both stop trials"
        problems += [Problem(message, "leave --hyperband or --median out", "--median")]
    if request.seeds and "seed" in fields:
        hint = "leave out --seeds, or --vary seed"
        problems += [Problem("seed is varied, and --seeds varies it too", hint, "--seeds")]
    if request.shared_batches and "data.seed" in fields:
        message = "data.seed is varied, and with --shared-batches all trials have one"
        hint = "leave out --shared-batches, or --vary data.seed"
        problems += [Problem(message, hint, "--shared-batches")]
    elif request.shared_batches and not (request.seeds or "seed" in fields):
        message = "all trials have one seed, and read the same data without it"
        hint = "leave --shared-batches out; or --seeds K, or --vary seed=A,B"
        problems += [Problem(message, hint, "--shared-batches")]
    if not fields and (request.random or not request.seeds):
        hint = "--vary optimizer.lr=1e-3,3e-3 or LOW..HIGH; --seeds K trains one config K times"
        problems += [Problem("no field is varied, so all trials are one", hint, "--vary")]
    if request.sampler and not request.random:
        problems += [Problem("a sampler proposes any number of trials", "--random N", "--sampler")]
    for flag, given in (("hyperband", request.hyperband), ("seeds", request.seeds)):
        if request.sampler and given:
            message = f"--{flag} takes all trials at once, and a sampler proposes some at a time"
            problems += [Problem(message, f"leave out --{flag}", "--sampler")]
    if problems:
        raise MtcliError(*problems)


def _require_rules(trials: Sequence[Trial], rule: Hyperband | None, median: int | None) -> None:
    """Raises MtcliError where a rule that stops trials cannot be applied to all of them."""
    shortest, problems = min(trial.config.train.steps for trial in trials), []
    if rule and rule.units > shortest:
        message = f"R={rule.units} units, and train.steps={shortest}"
        problems += [Problem(message, "a unit is at least one step: lower R", "--hyperband")]
    if rule and (most := max(map(len, partitions(trials)))) > rule.trials():
        message = f"its brackets take {rule.trials()} trials, and there are {most}"
        hint = f"--random {rule.trials()}, fewer values, or a larger R"
        problems += [Problem(message, hint, "--hyperband")]
    if median and median >= shortest:
        message = f"every {median} steps, and train.steps={shortest}: no trial would be stopped"
        hint = f"1 to {shortest - 1}" if shortest > 1 else "more train.steps"
        problems += [Problem(message, hint, "--median")]
    if problems:
        raise MtcliError(*problems)
