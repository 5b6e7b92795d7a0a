"""Reads a sweep's command line into its trials, and refuses what is none. Imports no torch."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.checkpoint.fine_tuning import require_weights, starting_tokenizer
from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.loading import Table
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.epochs import with_steps
from mtcli.core.data.loader import require_data
from mtcli.core.data.subset import require_subset
from mtcli.core.runtime.atomic_writes import folder_of, make_folder
from mtcli.core.sweep.rules import array_problems
from mtcli.core.sweep.sampling import SamplingPlan, read_sampler
from mtcli.core.sweep.stopping import Hyperband
from mtcli.core.sweep.trials import Budget, SweepSpace, Trial, partitioning_fields, partitions


class SweepPlan(NamedTuple):
    """What is to be trained, and how."""

    trials: list[Trial]
    output: Path
    max_fused: int  # models of an array; 0: as many as memory allows
    resume: bool
    hyperband: Hyperband | None
    median: int  # steps between applications of the median rule; 0: none
    space: SweepSpace
    sampling: SamplingPlan | None  # where trials are proposed as the sweep goes on; `trials` is one
    fields: tuple[str, ...]  # that are varied
    asked: Mapping[str, Any]  # by the command line, for sweep.json


def sweep_plan(
    source: str | Table,
    overrides: Sequence[str],
    output: Path,
    world: int,
    asked: Mapping[str, Any],
) -> SweepPlan:
    """The plan of a command line; `asked` are its flags by name.

    Raises MtcliError with all that is wrong: unknown fields and values, configs that no array
    trains, and data that is not there.
    """
    space = SweepSpace(source, overrides, output)
    sampler, rule, varied, *_ = collect_errors(
        lambda: read_sampler(asked["sampler"]),
        lambda: read_hyperband(asked["hyperband"]),
        lambda: space.read(asked["vary"]),
        lambda: _require_one_rule(asked),
        lambda: _require_array(space.base, world),
    )
    if asked["seeds"] and any(one.field == "seed" for one in varied):
        hint = "leave out --seeds, or --vary seed"
        raise wrong("seed is varied, and --seeds varies it too", hint, "--seeds")
    ranges = any(one.range for one in varied)
    drawn = asked["random"] or (rule.trials() if rule and ranges else 0)
    sampling = None
    if sampler:
        sampling = SamplingPlan(sampler, varied, asked["random"], space.base.seed)
        drawn = 1
    points = space.points(varied, Budget(drawn, asked["seeds"] or 0))
    trials = planned(space.checked(points, asked["shared_batches"], world), world, asked["resume"])
    if rule and rule.units > trials[0].config.train.steps:
        message = f"R={rule.units} units, and train.steps={trials[0].config.train.steps}"
        raise wrong(message, "a unit is at least one step: lower R", "--hyperband")
    with folder_of("--output", output):
        make_folder(output.absolute())
    return SweepPlan(
        trials=trials,
        output=output,
        max_fused=asked["max_fused"] or 0,
        resume=asked["resume"],
        hyperband=rule,
        median=asked["median"] or 0,
        space=space,
        sampling=sampling,
        fields=tuple(dict.fromkeys(field for point in points for field in point)),
        asked=asked,
    )


def planned(trials: Sequence[Trial], world: int, resume: bool) -> list[Trial]:
    """The trials, with the steps of their epochs. Raises MtcliError with all that keeps them out of
    arrays, and what is wrong with their data and, unless they `resume`, first weights."""
    groups = partitions(trials)
    slowest = (max(group, key=lambda t: t.config.optimizer.warmup_steps) for group in groups)
    firsts = [partial(_planned, trial.config, world, resume) for trial in slowest]
    found = {}
    for group, config in zip(groups, collect_errors(*firsts), strict=True):
        for trial in group:
            train = trial.config.train.model_copy(update={"steps": config.train.steps})
            run = trial.config.model_copy(update={"train": train})
            found[trial.name] = trial._replace(config=run)
    return [found[trial.name] for trial in trials]


def _planned(config: RunConfig, world: int, resume: bool) -> RunConfig:
    """The config of an array's model with the steps of its epochs."""
    checks = [require_data, require_subset, *([] if resume else [require_weights])]
    collect_errors(
        partial(_require_array, config, world), *(partial(check, config) for check in checks)
    )
    if config.data.format == "tokens":
        return config
    return with_steps(config, starting_tokenizer(config))


def partition_notes(plan: SweepPlan) -> list[str]:
    """Says which varied fields partition the trials, and into how many sets."""
    fields, sets = partitioning_fields(plan.trials, plan.fields), len(partitions(plan.trials))
    if not fields:
        return []
    what = f"{', '.join(fields)} {'changes' if len(fields) == 1 else 'change'} more than numbers"
    return [f"{what}: {len(plan.trials)} trials in {sets} sets, each an array or more of its own"]


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


def _require_one_rule(asked: Mapping[str, Any]) -> None:
    if asked["hyperband"] and asked["median"]:
        hint = "leave one of them out"
        raise wrong("Hyperband and the median rule both stop trials", hint, "--median")
    if not asked["sampler"]:
        return
    if not asked["random"]:
        raise wrong("a sampler proposes any number of trials", "--random N", "--sampler")
    for flag in ("hyperband", "seeds"):
        if asked[flag]:
            message = f"--{flag} takes all trials at once, and a sampler proposes some at a time"
            raise wrong(message, f"leave out --{flag}", "--sampler")


def _require_array(config: RunConfig, world: int) -> None:
    problems: list[Problem] = list(array_problems(config, world))
    if problems:
        raise MtcliError(*problems)
