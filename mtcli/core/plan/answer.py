"""The answer to a request: one prediction, the candidates of a search, and whether it fits."""

from dataclasses import dataclass, replace

from mtcli.core.config.errors import MtcliError, Problem, failed
from mtcli.core.config.layout_rules import LAYOUT_RULES
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.rules import lasting_problems, refusal
from mtcli.core.config.rules import problems as broken_rules
from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.fewest_devices import fewest
from mtcli.core.plan.hardware import for_run
from mtcli.core.plan.predict import Prediction, predict_workload
from mtcli.core.plan.request import PlanRequest, round_batch, rule_problems
from mtcli.core.plan.search import Candidate, SearchResult, apply, search
from mtcli.core.plan.sensitivity import Neighbour, neighbours
from mtcli.core.plan.tables import Json, as_json, describe, figures, gib, stage_table, summary
from mtcli.core.plan.workload import Workload
from mtcli.core.runtime.atomic_writes import aside
from mtcli.core.schedule.timeline import Timeline

DEFAULT_TOP = 5
WORTH_SAYING = 0.02  # more tokens a second, for which another global batch is named
DRAWN_MICRO_BATCHES = 2  # times pp: what a drawing shows of a longer step


@dataclass(frozen=True)
class PlanAnswer:
    """The plan of one config: its cost, and the candidates where a search was asked for."""

    config: RunConfig
    prediction: Prediction
    candidates: tuple[Prediction, ...] = ()
    search_title: str = ""
    others: tuple[Neighbour, ...] = ()  # the best layout with one field changed
    tried: int = 0  # layouts of a search that found none to fit
    enough: Candidate | None = None  # on more devices, where none fits those that were asked for

    @property
    def title(self) -> str:
        """What is planned, in one line."""
        work, device = self.prediction.work, self.prediction.device
        return f"{work.layout.world} x {device.name}, {work.precision}: {describe(self.prediction)}"

    @property
    def drawing(self) -> Timeline:
        """The simulated timeline, of a step of fewer micro-batches where it has many."""
        return self.prediction.timeline(self._drawn)

    @property
    def drawing_title(self) -> str:
        """`title`, and how much of the step `drawing` shows."""
        all_of_them = self.prediction.work.num_micro_batches
        few = f"\ndrawn with {self._drawn} of its {all_of_them:,} micro-batches"
        return self.title + (few if self._drawn < all_of_them else "")

    @property
    def _drawn(self) -> int:
        work = self.prediction.work
        return min(work.num_micro_batches, DRAWN_MICRO_BATCHES * work.layout.pp)

    def as_json(self) -> Json:
        """The JSON contract of `mtcli plan --json`."""
        return as_json(self.prediction, self.candidates) | {
            "evaluation": self.evaluation,
            "neighbours": [
                {
                    "field": one.field,
                    "value": one.value,
                    "step_seconds": one.prediction.step_seconds,
                    "fits": one.prediction.fits,
                    "reason": one.reason,
                }
                for one in self.others
            ],
            "fits_from": None if self.enough is None else figures(self.enough.prediction),
        }

    @property
    def evaluation(self) -> Json | None:
        """Cost of evaluation between the steps, where the config asks for it: {every, batches,
        seconds of each, seconds_per_step, memory_bytes of a rank at most}."""
        train = self.config.train
        if not train.eval_every:
            return None
        seconds = train.eval_batches * self.prediction.evaluation_seconds
        return {
            "every": train.eval_every,
            "batches": train.eval_batches,
            "seconds": seconds,
            "seconds_per_step": seconds / train.eval_every,
            "memory_bytes": round(self.prediction.memory.total),
        }

    def summary(self) -> list[list[str]]:
        """Rows of the summary table."""
        rows = [list(row) for row in summary(self.prediction)]
        if found := self.evaluation:
            share = found["seconds_per_step"] / self.prediction.step_seconds
            every = f"{found['seconds']:.4g} s every {found['every']:,} steps"
            text = f"{every}, {share:.1%} more time; no more memory than a step's peak"
            rows.append(["evaluation", text])
        return rows

    def memory_table(self) -> tuple[list[str], list[list[str]]]:
        """(headings, a row per pipeline rank): what its ranks hold."""
        return stage_table(self.prediction)

    def candidate_columns(self) -> list[str]:
        """Headings of the candidates' table."""
        return ["", "layout", "step", "MFU", "memory", "bubble", "communication", "slower"]

    def candidate_rows(self) -> list[list[str]]:
        """A row per candidate: its cost, where its time goes, and how far it is from the best."""
        first = self.candidates[0].step_seconds
        rows = []
        for place, one in enumerate(self.candidates, start=1):
            sent = sum(one.communication_seconds.values()) / one.step_seconds
            slower = f"{one.step_seconds / first - 1:.1%}" if place > 1 else ""
            figures = [f"{one.step_seconds:.4g} s", f"{one.mfu:.1%}", gib(one.memory.total)]
            shares = [f"{one.bubble_fraction:.1%}", f"{sent:.1%}", slower]
            rows.append([str(place), describe(one), *figures, *shares])
        return rows

    def other_rows(self) -> list[list[str]]:
        """A row per changed field of the best layout: what became of it, and why."""
        rows = []
        for one in self.others:
            figures = [f"{one.prediction.step_seconds:.4g} s", gib(one.prediction.memory.total)]
            rows.append(
                [f"{one.field}={one.value}", one.reason, *figures, describe(one.prediction)]
            )
        return rows

    def enough_rows(self) -> list[list[str]]:
        """Rows on the fewest devices on which a layout fits."""
        assert self.enough is not None
        p = self.enough.prediction
        held = f"{gib(p.memory.total)} of {gib(p.device.memory_bytes)}"
        rate = f"{p.step_seconds:.4g} s, {p.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
        return [["layout", describe(p)], ["bytes per rank", held], ["step time", rate]]

    @property
    def enough_title(self) -> str:
        """From how many devices on a layout fits."""
        assert self.enough is not None
        p = self.enough.prediction
        return f"It fits from {p.work.layout.world:,} x {p.device.name} on"

    def save_config(self, target: str) -> None:
        """Writes the config as TOML that `mtcli train` takes; aside, synced, then renamed.

        Raises MtcliError (exit 1) where the file cannot be written.
        """
        with aside(target) as path:
            path.write_text(dump_toml(self.config), encoding="utf-8")

    def require_fit(self) -> None:
        """Raises MtcliError (exit 1) with both numbers where the plan does not fit."""
        p = self.prediction
        if not p.fits:
            need, have = gib(p.memory.total), gib(p.device.usable_bytes)
            whole = gib(p.device.memory_bytes)
            hint = "raise tp or pp, shard with zero, recompute, or cut the micro-batch; or --top 5"
            if self.tried:
                hint = f"none of {self.tried:,} layouts fits; {self._way_to_fit()}"
            raise failed(
                f"a rank needs {need} and can use {have} of {p.device.name}'s {whole}", hint
            )

    def _way_to_fit(self) -> str:
        """Names the fewest devices that hold the model, where those asked for do not."""
        p, more = self.prediction, []
        if self.enough is not None:
            wider = self.enough.prediction
            world = wider.work.layout.world
            more.append(f"from {world:,} devices on one does (--gpus {world}): {describe(wider)}")
        elif p.device.name == "cpu":
            more.append("a smaller model or micro-batch: the ranks share this machine's memory")
        else:
            more.append("nor does one on more devices: a smaller model or sequence")
        batch = round_batch(p.work.global_batch_size, p.work.layout.world)
        if batch != p.work.global_batch_size:
            more.append(f"or a batch that more layouts divide, such as --global-batch {batch}")
        return "; ".join(more)


def answer(request: PlanRequest, top: int | None) -> PlanAnswer:
    """The plan of a request: a prediction, or a search where one was asked for.

    Raises MtcliError with every problem of an illegal request, and where a search finds no layout.
    """
    try:
        return _answer(request, top)
    except MtcliError as error:  # the rules are those of every command, and name its flag
        told = (p._replace(hint=p.hint.replace("(--nproc)", "(--gpus)")) for p in error.problems)
        raise MtcliError(*told, code=error.code, hint=error.hint) from None


def _answer(request: PlanRequest, top: int | None) -> PlanAnswer:
    config = request.config
    if top is None and not request.wants_search:
        problems = rule_problems(request)
        if config is None:
            raise MtcliError(*problems)
        if problems:
            raise refusal(config, request.gpus, problems)
        work = Workload.of(config, request.world)
        device = for_run(request.device, config, request.world, request.calibrates)
        return PlanAnswer(config, predict_workload(work, device))
    lasting = [*request.problems, *(lasting_problems(config) if config else ())]
    if lasting or config is None:  # no layout that a search could find would be legal
        raise MtcliError(*lasting)
    device = for_run(request.device, config, request.world, request.calibrates)
    request = replace(request, device=device)
    found = _search(config, request, top or DEFAULT_TOP)
    if found.tried or request.keeps_batch:
        return _best(config, request, found)
    resized = _with_batch(config, round_batch(config.batch.global_batch_size, request.world))
    again = _search(resized, request, top or DEFAULT_TOP)
    if not again.tried:
        return _best(config, request, found)
    why = f" of {resized.batch.global_batch_size:,} sequences, as none cuts the preset's "
    return _best(resized, request, again, f"{why}{config.batch.global_batch_size:,}")


def _search(config: RunConfig, request: PlanRequest, top: int) -> SearchResult:
    return search(config, request.world, request.device, top, request.pinned)


def _with_batch(config: RunConfig, sequences: int) -> RunConfig:
    batch = config.batch.model_copy(update={"global_batch_size": sequences})
    return config.model_copy(update={"batch": batch})


def _other_batch(config: RunConfig, request: PlanRequest, best: Prediction) -> list[Neighbour]:
    """The best layout of a global batch that more layouts divide, where its tokens pass quicker."""
    near = round_batch(config.batch.global_batch_size, request.world)
    if near == config.batch.global_batch_size:
        return []
    found = [one.prediction for one in _search(_with_batch(config, near), request, 1).best]
    gains = [one.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1 for one in found]
    return [
        Neighbour("global-batch", near, one, f"{gain:+.1%} tokens/s, as more layouts divide it")
        for one, gain in zip(found, gains, strict=True)
        if gain > WORTH_SAYING
    ]


def _best(
    config: RunConfig, request: PlanRequest, found: SearchResult, why: str = ""
) -> PlanAnswer:
    if found.best:
        predictions = tuple(candidate.prediction for candidate in found.best)
        title = f"Best {len(predictions)} of {found.tried:,} layouts{why}"
        title += f", {found.too_large:,} faster ones do not fit" if found.too_large else ""
        others = (
            *_other_batch(config, request, predictions[0]),
            *neighbours(predictions, found.works),
        )
        return PlanAnswer(found.best[0].config, predictions[0], predictions, title, others)
    if found.nearest:  # legal, and too large: say by how much
        prediction = predict_workload(found.nearest, request.device)
        least = apply(config, found.nearest)
        return PlanAnswer(least, prediction, tried=found.tried, enough=fewest(config, request))
    batch = config.batch.global_batch_size
    near = round_batch(batch, request.world)
    such = f"--global-batch {near}, or another" if near != batch else "a global batch"
    hint = f"{such} that the data ranks divide; or pin fewer fields"
    message = f"no layout of {request.world} ranks cuts this model and global_batch_size={batch}"
    none = Problem(message, hint, "--gpus")
    broken = broken_rules(config, request.world)
    if not request.pinned:  # the search has tried every other layout than the config's own
        curable = [problem for rule in LAYOUT_RULES for problem in rule(config, request.world)]
        broken = [problem for problem in broken if problem not in curable]
    raise refusal(config, request.gpus, [none, *broken])
