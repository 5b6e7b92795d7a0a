"""Answers `mtcli plan` with the prediction of a config, or with the best candidates of a search."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import PurePath
from shlex import quote

from mtcli.core.config.counts import counted
from mtcli.core.config.errors import MtcliError, Problem, collect_errors, failed, wrong
from mtcli.core.config.layout_rules import LAYOUT_RULES
from mtcli.core.config.loading import (
    Table,
    dump_toml,
    preset_names,
    table_of,
    validate,
    with_overrides,
)
from mtcli.core.config.phases import phases_of, tokens_of, with_steps_of_tokens
from mtcli.core.config.rules import lasting_problems, refusal
from mtcli.core.config.rules import problems as broken_rules
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import shown
from mtcli.core.mesh.parameters import pattern_problems
from mtcli.core.plan.budget import Goal, PhasePlan, RunTotals, budget_of, duration_words
from mtcli.core.plan.hardware import Device, device_named, for_run, gib
from mtcli.core.plan.interruptions import Assumed, read_assumed
from mtcli.core.plan.kept_search import kept_search
from mtcli.core.plan.predict import Prediction, predict_workload
from mtcli.core.plan.search import (
    Rehearse,
    SearchResult,
    apply,
    as_estimated,
    fewest,
    round_batch,
    with_batch,
)
from mtcli.core.plan.sensitivity import CONFIG_NAMES, FIELDS, Neighbour, neighbours
from mtcli.core.plan.workload import Workload
from mtcli.core.runtime.atomic_writes import aside
from mtcli.core.schedule.timeline import Timeline

DEFAULT_TOP = 5
MOST_TOKENS = 1e18
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
TOKENS_PER_STEP = 4 * 2**20  # the global batch of a preset that states none
WORTH_SAYING = 0.02  # gain in tokens/s from which another global batch is suggested
DRAWN_MICRO_BATCHES = 2  # times pp: micro-batches in the drawing of a longer step


@dataclass(frozen=True)
class PlanRequest:
    """A request to `mtcli plan`. `config` is None where the config has too many problems to build
    it."""

    config: RunConfig | None
    problems: tuple[Problem, ...]
    gpus: int | None  # as asked for
    world: int
    device: Device
    pinned: frozenset[str]
    wants_search: bool  # a preset and a number of devices, without a layout from the user
    keeps_batch: bool  # the global batch is the user's, not a preset's
    calibrates: bool  # measures this machine's rates, where the plan is for it
    budget: RunTotals | None = None  # where a total is asked for
    goal: Goal = "time"


@dataclass(frozen=True)
class PlanAnswer:
    """The plan of a config: its predicted cost, and the candidates if a search was asked for."""

    config: RunConfig
    prediction: Prediction
    candidates: tuple[Prediction, ...] = ()
    search_title: str = ""
    neighbours: tuple[Neighbour, ...] = ()  # the best layout with one field changed
    tried: int = 0  # layouts of a search that found none to fit
    enough: Prediction | None = None  # on the fewest devices that hold it, where these do not
    budget: RunTotals | None = None
    phases: tuple[PhasePlan, ...] = ()  # that have steps; none of a run without [[phase]]
    data: tuple[str, ...] = ()  # what tokenizing each text takes that the run would begin with

    @property
    def fullest(self) -> Prediction:
        """The prediction with the most bytes of a rank: of the largest phase."""
        phases = (one.prediction for one in self.phases)
        return max((self.prediction, *phases), key=lambda p: p.memory.total)

    @property
    def title(self) -> str:
        """The title: the planned model, world and device in one line."""
        work, device = self.prediction.work, self.prediction.device
        waits = ", waits for the host" if self.prediction.waits_for_host else ""
        return f"{work.layout.world} x {device.name}, {work.precision}: {work.layout_words}{waits}"

    @property
    def length(self) -> str:
        """The length of the config's run in words, with its saves and the failures to expect; empty
        where epochs of data decide it."""
        train, p = self.config.train, self.prediction
        if train.epochs and "steps" not in train.model_fields_set:
            return ""
        totals = RunTotals(tokens_of(self.config), train=train, phases=self.phases)
        totals = totals._replace(assumed=self.budget.assumed) if self.budget else totals
        seconds = totals.interrupted(p, p.step_seconds).wall
        lasts = duration_words(seconds) if seconds < inf else "no end, as failures come too often"
        return f"{lasts} for {train.steps:,} steps, {totals.tokens:.4g} tokens"

    @property
    def drawing(self) -> Timeline:
        """The simulated timeline; a long step is drawn with fewer micro-batches."""
        return self.prediction.timeline(self._drawn)

    @property
    def drawing_title(self) -> str:
        """The title of `drawing`, with the number of micro-batches that it shows."""
        all_of_them = self.prediction.work.num_micro_batches
        few = f"\ndrawn with {self._drawn} of its {all_of_them:,} micro-batches"
        return self.title + (few if self._drawn < all_of_them else "")

    @property
    def _drawn(self) -> int:
        work = self.prediction.work
        return min(work.num_micro_batches, DRAWN_MICRO_BATCHES * work.layout.pp)

    def save_config(self, target: str) -> None:
        """Writes the config as TOML for `mtcli train`, atomically; its first lines say what was
        planned.

        Raises MtcliError (exit 1) where the file cannot be written.
        """
        p, name = self.prediction, PurePath(target).name
        again = f"mtcli plan {quote(name)} --gpus {p.work.layout.world} --device {p.device.name}"
        lines = [f"planned: {self.title}", f"a step: {p.step_seconds:.4g} s"]
        lines += [f"the run: {self.length}; train.steps sets it"] * bool(self.length)
        header = "".join(f"# {line}\n" for line in [*lines, f"again: {again}"])
        with aside(target) as path:
            path.write_text(header + dump_toml(self.config), encoding="utf-8")

    def require_fit(self) -> None:
        """Raises MtcliError (exit 1) with both numbers where the plan does not fit."""
        p = self.fullest
        if not p.fits:
            need, have = gib(p.memory.total), gib(p.device.usable_bytes)
            capacity = gib(p.device.memory_bytes)
            hint = "raise tp or pp, shard with zero, recompute, or cut the micro-batch; or --top 5"
            if self.tried:
                hint = f"none of {self.tried:,} layouts fits; {_way_to_fit(p, self.enough)}"
            raise failed(
                f"a rank needs {need} and can use {have} of {p.device.name}'s {capacity}", hint
            )


def read_request(
    source: str | Table,
    overrides: Sequence[str],
    fixed: Sequence[str],
    gpus: int | None,
    device: str | None,
    calibrates: bool = True,
) -> PlanRequest:
    """Reads a config file or preset with `--set` and `--fix` on top.

    Raises MtcliError where the source or an override cannot be read; an unknown device is then
    among its problems. Problems of a config that was read, or of the device's name, are in
    `problems`.
    """
    usual = "cpu" if gpus is None else "h100"
    (table,) = collect_errors(
        lambda: with_overrides(table_of(source, overrides), fixed, "--fix"),
        otherwise=partial(device_named, device or usual),
    )
    chosen, unknown = _chosen_device(device, usual)
    own_layout = any(item.strip().startswith("parallel.") for item in overrides)
    own_batch = any(item.strip().startswith("batch.global_") for item in (*overrides, *fixed))
    bare = source in preset_names() and gpus is not None and not own_layout
    table = _filled(table, gpus, chosen)
    config, problems = validate(table)
    problems = problems or (pattern_problems(config) if config else [])
    pinned = frozenset(item.partition("=")[0].strip() for item in fixed)
    return PlanRequest(
        config=config,
        problems=(*problems, *unknown, *_not_searched(pinned)),
        gpus=gpus,
        world=gpus or (config.parallel.smallest_world if config else 1),
        device=chosen,
        pinned=pinned,
        wants_search=bare or bool(fixed),
        keeps_batch=own_batch or source not in preset_names(),
        calibrates=calibrates,
    )


def with_run(
    request: PlanRequest,
    tokens: str | None,
    price: float | None,
    goal: Goal,
    assume: Sequence[str] = (),
) -> PlanRequest:
    """The request for a run of some tokens, by default its steps', at a price of a device and hour,
    with changes of what is assumed, whose answer has the least of `goal`."""
    problems = list(request.problems)
    if goal != "time" and request.gpus is None:
        problems.append(
            Problem(f"--minimise {goal} searches counts of devices", "--gpus N", "--gpus")
        )
    total, assumed = None, Assumed()
    try:
        total, assumed = collect_errors(
            lambda: None if tokens is None else read_tokens(tokens),
            lambda: read_assumed(assume, request.device.name),
        )
    except MtcliError as error:
        problems += error.problems
    request = replace(request, problems=tuple(problems), goal=goal)
    if request.config is None or (
        goal == "time" and not assume and (tokens, price) == (None, None)
    ):
        return request
    config = request.config
    if config.phase and total:
        train = config.train.model_copy(update={"tokens": round(total)})
        config = with_steps_of_tokens(config.model_copy(update={"train": train}))
    budget = RunTotals(total or tokens_of(config), price, config.train, assumed)
    return replace(request, config=config, budget=budget)


def read_tokens(text: str) -> float:
    """Parses a number of tokens, such as 300e9, 15T or 250M. Raises MtcliError for another text."""
    number, unit = (text[:-1], text[-1:]) if text[-1:].upper() in UNITS else (text, "")
    with suppress(ValueError):
        if 1.0 <= (tokens := float(number) * UNITS.get(unit.upper(), 1.0)) <= MOST_TOKENS:
            return tokens
    hint = f"1 to {MOST_TOKENS:g}, such as 300e9, 300B or 15T"
    raise wrong(f"{shown(text)} is no number of tokens", hint, "--tokens")


def _chosen_device(name: str | None, usual: str) -> tuple[Device, tuple[Problem, ...]]:
    """(the device of a name, or the usual one without a name or for a wrong one; the name's
    problems)."""
    try:
        return device_named(name or usual), ()
    except MtcliError as error:
        return device_named(usual), error.problems


def _filled(table: Table, gpus: int | None, device: Device) -> Table:
    """Fills in what a bare preset leaves open: sequence length, global batch and precision."""
    config, _ = validate(table)
    if config is None or gpus is None:
        return table
    batch, train = dict(table.get("batch", {})), dict(table.get("train", {}))
    seq_len = batch.setdefault("seq_len", config.model.max_seq_len)
    if "global_batch_size" not in batch and isinstance(seq_len, int) and seq_len > 0:
        batch["global_batch_size"] = round_batch(TOKENS_PER_STEP // seq_len, gpus)
    if device.name != "cpu":
        train.setdefault("precision", device.half_precision)
    return table | {"batch": batch, "train": train}


def _not_searched(pinned: frozenset[str]) -> list[Problem]:
    searched = {CONFIG_NAMES.get(name, f"parallel.{name}") for name in FIELDS}
    hint = f"one of {', '.join(sorted(searched))}; set others with --set"
    return [
        Problem(f"--fix {field} pins a field that is not searched", hint, field)
        for field in sorted(pinned - searched)
    ]


def answer(request: PlanRequest, top: int | None, rehearse: Rehearse = as_estimated) -> PlanAnswer:
    """The plan of a request: a prediction, or a search where one was asked for. `rehearse` replaces
    estimated bytes by those of the real stages.

    Raises MtcliError with every problem of an illegal request, and where a search finds no layout.
    """
    try:
        if request.goal == "time":
            found = _answer(request, top, rehearse)
        else:
            found = _cheapest(request, top or DEFAULT_TOP, rehearse)
        phases = _phases(found, rehearse)
        budget = request.budget and request.budget._replace(phases=phases)
        return replace(found, budget=budget, phases=phases)
    except MtcliError as error:  # the rules are those of every command, and name its flag
        shown = (p._replace(hint=p.hint.replace("(--nproc)", "(--gpus)")) for p in error.problems)
        raise MtcliError(*shown, code=error.code, hint=error.hint) from None


def _phases(found: PlanAnswer, rehearse: Rehearse) -> tuple[PhasePlan, ...]:
    """The cost of each phase on the layout of an answer."""
    spans = [span for span in phases_of(found.config) if span.steps]
    if not found.config.phase:
        return ()
    p = found.prediction
    plans = [
        (span.config, predict_workload(Workload.of(span.config, p.work.layout.world), p.device))
        for span in spans
    ]
    predictions = rehearse(plans)
    return tuple(
        PhasePlan(span.number, span.steps, one)
        for span, one in zip(spans, predictions, strict=True)
    )


def _cheapest(request: PlanRequest, top: int, rehearse: Rehearse) -> PlanAnswer:
    """The answer with the fewest GPU-hours of the whole run, to which money and energy are
    proportional, among searches of as many devices as asked for, half of them, a quarter and so on
    while one holds the model."""
    found = [_answer(request, top, rehearse)]
    world = request.world
    while found[-1].prediction.fits and world % 2 == 0:
        world //= 2
        try:
            found.append(_answer(replace(request, world=world, gpus=world), top, rehearse))
        except MtcliError:  # no layout divides the batch among so few
            break
    fitting = [one for one in found if one.prediction.fits] or found[:1]

    def hours(one: PlanAnswer) -> float:
        assert request.budget is not None, request.goal
        budget = request.budget._replace(phases=_phases(one, rehearse))
        return budget_of(one.prediction, budget)["gpu_hours"]["planned"] or inf

    best = min(fitting, key=hours)
    counts = ", ".join(str(one.prediction.work.layout.world) for one in fitting)
    return replace(
        best, search_title=f"{best.search_title}; least {request.goal} of {counts} devices"
    )


def _answer(request: PlanRequest, top: int | None, rehearse: Rehearse) -> PlanAnswer:
    config, world = request.config, request.world
    searches = top is not None or request.wants_search
    problems = list(request.problems)
    if config:  # a search is refused for what no layout could cure
        problems += lasting_problems(config) if searches else broken_rules(config, world)
    if config is None or (problems and searches):
        raise MtcliError(*problems)
    if problems:
        raise refusal(config, request.gpus, problems)
    device = for_run(request.device, config, world, request.calibrates)
    if not searches:
        estimate = predict_workload(Workload.of(config, world), device)
        (prediction,) = rehearse([(config, estimate)])
        return PlanAnswer(config, prediction)
    return _searched(config, replace(request, device=device), top or DEFAULT_TOP, rehearse)


def _searched(config: RunConfig, request: PlanRequest, top: int, rehearse: Rehearse) -> PlanAnswer:
    searched, resized = _search(config, request, top, rehearse), ""
    if not searched.tried and not request.keeps_batch:
        batch = config.batch.global_batch_size
        other = with_batch(config, round_batch(batch, request.world))
        if (again := _search(other, request, top, rehearse)).tried:
            resized = f" of {other.batch.global_batch_size:,} sequences, as none cuts the preset's "
            config, searched, resized = other, again, f"{resized}{batch:,}"
    if searched.best:
        candidates = tuple(candidate.prediction for candidate in searched.best)
        number = len(candidates)
        title = f"Best {number} of {searched.tried:,} layouts{resized}"
        title += ", one of each tp, cp, pp, ep and zero" if number > 1 and searched.by_kind else ""
        title += f", {searched.too_large:,} faster ones do not fit" if searched.too_large else ""
        near = (
            *_other_batch(config, request, candidates[0]),
            *neighbours(candidates, searched.works),
        )
        return PlanAnswer(searched.best[0].config, candidates[0], candidates, title, near)
    if searched.nearest:  # legal, and too large: say by how much
        nearest = apply(config, searched.nearest)
        estimate = predict_workload(searched.nearest, request.device)
        (prediction,) = rehearse([(nearest, estimate)])
        if prediction.fits:  # its estimate was too high
            return PlanAnswer(nearest, prediction, (prediction,), "Best layout")
        asked = request.world, request.device, request.pinned, request.keeps_batch
        enough = fewest(config, *asked, rehearse)
        return PlanAnswer(
            nearest,
            prediction,
            tried=searched.tried,
            enough=enough.prediction if enough else None,
        )
    raise _no_layout(config, request)


def _search(
    config: RunConfig, request: PlanRequest, top: int, rehearse: Rehearse = as_estimated
) -> SearchResult:
    return kept_search(config, request.world, request.device, top, request.pinned, rehearse)


def _other_batch(config: RunConfig, request: PlanRequest, best: Prediction) -> list[Neighbour]:
    """The best layout of a nearby global batch that more layouts divide, if it has more
    tokens/s."""
    near = round_batch(config.batch.global_batch_size, request.world)
    if near == config.batch.global_batch_size:
        return []
    predictions = [one.prediction for one in _search(with_batch(config, near), request, 1).best]
    gains = [p.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1 for p in predictions]
    return [
        Neighbour("global-batch", near, p, f"{gain:+.1%} tokens/s, as more layouts divide it")
        for p, gain in zip(predictions, gains, strict=True)
        if gain > WORTH_SAYING
    ]


def _no_layout(config: RunConfig, request: PlanRequest) -> MtcliError:
    """The error that says why no layout shards this model and its global batch."""
    batch = config.batch.global_batch_size
    near = round_batch(batch, request.world)
    such = f"--global-batch {near}, or another" if near != batch else "a global batch"
    hint = f"{such} that the data ranks divide; or pin fewer fields"
    ranks = counted(request.world, "rank")
    message = f"no layout of {ranks} cuts this model and global_batch_size={batch}"
    broken = broken_rules(config, request.world)
    if not request.pinned:  # the search has tried every other layout than the config's own
        curable = [problem for rule in LAYOUT_RULES for problem in rule(config, request.world)]
        broken = [problem for problem in broken if problem not in curable]
    return refusal(config, request.gpus, [Problem(message, hint, "--gpus"), *broken])


def _way_to_fit(p: Prediction, enough: Prediction | None) -> str:
    """The hint that names the fewest devices that hold the model, where the requested ones do
    not."""
    if enough:
        world = enough.work.layout.world
        way = f"from {world:,} devices on one does (--gpus {world}): {enough.work.layout_words}"
    elif p.device.name == "cpu":
        way = "a smaller model or micro-batch: the ranks share this machine's memory"
    else:
        way = "nor does one on more devices: a smaller model or sequence"
    batch = round_batch(p.work.global_batch_size, p.work.layout.world)
    if batch != p.work.global_batch_size:
        way += f"; or a batch that more layouts divide, such as --global-batch {batch}"
    return way
