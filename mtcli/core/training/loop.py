"""Runs `mtcli train`. Reads top to bottom as a run goes.

`drive` is the loop over steps of `mtcli sweep` too: a run alone is an array of one.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from mtcli.core.checkpoint.run_progress import BaseRecord
from mtcli.core.config.errors import collect_errors, failed, visible
from mtcli.core.config.phases import phase_after, phases_of
from mtcli.core.config.schema import RunConfig, TrainConfig
from mtcli.core.data.loader import require_data
from mtcli.core.parallel.groups import Axis, world_axis
from mtcli.core.parallel.together import together
from mtcli.core.runtime.attempts import Attempt
from mtcli.core.runtime.launch import Runtime, StopSignal
from mtcli.core.sync.replica_average import distance
from mtcli.core.sync.traffic import SyncTraffic
from mtcli.core.training.consumed_samples import ConsumedSamples
from mtcli.core.training.metrics import RunRecords, StepFacts
from mtcli.core.training.nonfinite import first_nonfinite
from mtcli.core.training.phase_data import open_phase
from mtcli.core.training.rank_times import StepTimer, agreed
from mtcli.core.training.reselect import Reselect, adopt_current, is_due
from mtcli.core.training.rounds import Rounds
from mtcli.core.training.run_folder import how_it_goes_on, newest_saved
from mtcli.core.training.run_lock import PATIENCE, lock_folder
from mtcli.core.training.run_log import RunLog, data_header, run_header
from mtcli.core.training.run_tokenizer import run_tokenizer
from mtcli.core.training.save import Saver
from mtcli.core.training.save_schedule import SaveSchedule
from mtcli.core.training.state import (
    RunState,
    StartingPoint,
    progress,
    restore,
    starting_notes,
    starting_point,
    with_tokenizer,
)
from mtcli.core.training.step import Step, Trainer
from mtcli.core.training.validation import ValidationLosses
from mtcli.core.training.validation_sets import (
    SetLosses,
)


class Tasks(Protocol):
    """Evaluation tasks on the weights of a run."""

    def require(self) -> None:
        """Raises MtcliError with all that is wrong with the tasks."""

    def __call__(self, step: int) -> Mapping[str, float]:
        """Returns the figures of the tasks that are due after a step, by their keys in its record.
        Collective."""


# Opens them for a run; the path is the tokenizer's folder, which its checkpoints get. Collective.
OpenTasks = Callable[[Trainer, Path | None], Tasks]


def train(
    config: RunConfig,
    runtime: Runtime,
    *,
    resume: bool,
    anew: bool = False,
    reselect: Reselect | None = None,
    open_tasks: OpenTasks | None = None,
) -> bool:
    """Trains to train.steps; returns False where a signal stopped it, after saving.

    `resume` goes on from the newest checkpoint of train.output, whatever layout wrote it; `anew`
    lets a run begin again that has saved none. A new run begins at step 0, with the weights of
    train.init where that is set. `reselect` is for data.reselect_every, `open_tasks` for [[eval]].
    """
    stop = StopSignal()
    world = world_axis(runtime.rank, runtime.world, runtime.recorder)
    with _locked(config, (resume, anew), runtime.attempt, world):
        start = starting_point(config, world)
        config = with_tokenizer(config, start)
        if reason := _finished(config.train, start):
            if world.rank == 0:
                sys.stdout.write(visible(f"nothing to do: {reason}, to go on from {start}\n"))
            return True
        return _train(config, runtime, start, stop, (reselect, open_tasks))


def _finished(train: TrainConfig, start: StartingPoint) -> str:
    """Says why a run that starts here has nothing to do, and what would let it go on; or empty."""
    if start.step >= train.steps:
        length = "train.tokens" if train.tokens else "train.steps"
        return f"step {start.step} of train.steps={train.steps} is done; set more {length}"
    losses = ValidationLosses(train, start)
    if not losses.has_ended:
        return ""
    return f"finished: stopped early at step {start.step}, as {losses}; set a larger train.patience"


@contextmanager
def _locked(
    config: RunConfig, begins: tuple[bool, bool], attempt: Attempt, world: Axis
) -> Iterator[None]:
    """Locks the run folder on rank 0. Raises MtcliError on every rank where the lock is refused.

    `begins` is (whether a run in the folder may be resumed, whether it may begin anew).
    """
    resumes, anew = begins
    with ExitStack() as stack:

        def take() -> str:
            if world.rank:
                return ""
            folder, patience = Path(config.train.output), PATIENCE * config.train.timeout
            return stack.enter_context(lock_folder(folder, resumes, attempt, patience, anew))

        checked_later = partial(require_data, config)
        (notice,) = together(world, lambda: collect_errors(take, otherwise=checked_later))
        if notice:
            sys.stderr.write(visible(f"note: {notice}\n"))
        yield


def _train(
    config: RunConfig,
    runtime: Runtime,
    start: StartingPoint,
    stop: StopSignal,
    commands: tuple[Reselect | None, OpenTasks | None],
) -> bool:
    trainer, phases = Trainer(config, runtime), phases_of(config)
    span = phase_after(phases, start.step)
    trainer.enter(span)
    data = open_phase(span, trainer.groups, start, runtime.local_rank)
    samples, last_good, base = restore(trainer, data.train, start, runtime.local_rank)
    reselect, open_tasks = commands
    adopt_current(data.train, config, reselect, trainer.step)
    tasks = open_tasks(trainer, run_tokenizer(config)) if open_tasks else None
    if tasks:
        together(trainer.groups.world, tasks.require)
    for note in starting_notes(config, start) if runtime.rank == 0 else ():
        sys.stderr.write(visible(f"{note}\n"))
    log = RunLog(config, runtime.rank == 0, trainer.step)
    header = run_header(config, runtime.world, trainer.state_bytes(), str(start))
    log.begin(runtime, header | data_header(config, data.train.batches, runtime.device))
    saves = SaveSchedule(config.train, config.data.reselect_every)  # its clock starts here
    train_step = Rounds(trainer).train if trainer.is_asynchronous else trainer.train_step

    def reselect_when_due(steps: Sequence[Step], going: object, stopped: bool) -> None:
        if is_due(config, steps[0].step) and not stopped:
            saver.finish()
            adopt_current(data.train, config, reselect, steps[0].step)

    with log, closing(data), Saver(trainer, log, last_good) as saver:
        seat = Seat(trainer, samples, log, saver, base, ValidationLosses(config.train, start))
        live = Live(
            [seat],
            saves,
            trainer.sync_traffic,
            train_step=lambda: [train_step(data.train)],
            evaluate=lambda: data.valid.evaluate(lambda loader: [trainer.evaluate(loader)]),
            stops=lambda: stop.received > 0,
            end=_give_up,
            after=reselect_when_due,
            tasks=tasks or (lambda step: {}),
            fault=lambda: f"; first {first_nonfinite(trainer, data.train)}",
        )
        log.enter(span)
        goes_on = drive(live, span.last_step)
        for later in phases[span.number + 1 :]:
            if goes_on and later.steps:
                trainer.enter(later)
                data.enter(later, samples, runtime.local_rank)
                log.enter(later)
                goes_on = drive(live, later.last_step)
        saver.finish()
        if early := seat.validation.has_ended:
            log.stopped_early(trainer.step, str(seat.validation))
    log.end()
    is_done = early or trainer.step >= config.train.steps
    if not is_done:
        log.stopped(trainer.step, stop.name, runtime)
    return is_done


class Seat(NamedTuple):
    """A run under way: its state, the samples it has read, its records and its saves."""

    run: RunState
    samples: ConsumedSamples
    log: RunLog | RunRecords
    saver: Saver
    base: BaseRecord | None  # the weights that its adapters are for
    validation: ValidationLosses

    def save(self) -> None:
        """Begins to save the run."""
        self.saver.save(progress(self.run, self.samples, self.base, self.validation.state))


@dataclass
class Live:
    """Runs that train in step, with the callbacks of their command, `train` or `sweep`."""

    seats: list[Seat]
    saves: SaveSchedule
    traffic: SyncTraffic
    train_step: Callable[[], Sequence[Step]]  # the next step of each run
    evaluate: Callable[[], Sequence[SetLosses]]  # each run's
    stops: Callable[[], bool]  # whether this rank was told to stop
    end: Callable[[Seat, str], None]  # of a run that cannot go on; raises where none goes on
    # Called after a step and its saves, with which seats go on and whether all stop.
    after: Callable[[Sequence[Step], Sequence[bool], bool], None]
    tasks: Callable[[int], Mapping[str, float]] = (
        lambda step: {}
    )  # the figures of the tasks that are due after a step
    fault: Callable[[], str] = str  # where the step went wrong first
    # Whether a run goes on after a step that is recorded.
    stepped: Callable[[Seat, Step, SetLosses | None], bool] = lambda *_: True


def drive(live: Live, until: int) -> bool:
    """Trains to a step, or until no run is left; returns False, after saving, where a rank was told
    to stop or no run improves."""
    if not live.seats:
        return True
    config, groups = live.seats[0].run.config.train, live.seats[0].run.groups
    timer, stopped, ended = StepTimer(groups.world), False, False
    while live.seats and live.seats[0].run.step < until and not (stopped or ended):
        timer.begin()
        steps = live.train_step()
        timer.end(steps[0].seconds)
        number, seats = steps[0].step, live.seats
        going = [_goes_on(live, seat, step) for seat, step in zip(seats, steps, strict=True)]
        distances = [distance(seat.run.exchange) for seat in seats]
        losses: Sequence[SetLosses | None] = [None] * len(seats)
        if config.eval_every and number % config.eval_every == 0:
            losses = live.evaluate()
        figures = live.tasks(number)
        times = timer.taken() if number % config.log_every == 0 else []
        due = live.saves.due_by_time(sum(seat.saver.stall_seconds for seat in seats))
        facts = live.stops(), due, live.traffic.taken(), times
        stopped, due, sent, ranks = agreed(groups, *facts)
        for i, (seat, step) in enumerate(zip(seats, steps, strict=True)):
            if going[i]:
                read, share = seat.run.consumed_samples, sent // len(seats)
                seat.log.step(step, StepFacts(read, losses[i], share, distances[i], ranks, figures))
                seat.saver.poll()
                going[i] = live.stepped(seat, step, losses[i])
        left = [i for i, goes in enumerate(going) if goes]
        best = [i for i in left if _is_best(seats[i], number, losses[i])]
        ended = bool(left) and all(seats[i].validation.has_ended for i in left)
        if stopped or due or ended or live.saves.due_by_step(number):
            save([seats[i] for i in left], live.saves)
        else:
            for i in best:
                seats[i].save()
        live.after(steps, going, stopped)
    for seat in live.seats:
        seat.run.strategy.settle()
        seat.saver.wait()
    return not (stopped or ended)


def save(seats: Sequence[Seat], saves: SaveSchedule) -> None:
    """Begins to save runs, one after another."""
    for seat in seats:
        seat.save()
    saves.saved()


def _is_best(seat: Seat, step: int, losses: SetLosses | None) -> bool:
    """Adds an evaluation, if there was one, to a run's; whether its checkpoint is to be kept."""
    return losses is not None and seat.validation.note(step, losses.loss)


def _goes_on(live: Live, seat: Seat, step: Step) -> bool:
    """Whether a run goes on after a step. The batch of a step without an update is recorded as
    skipped."""
    config = seat.run.config.train
    if step.outcome == "fault":
        scaled = f" at loss scale {step.loss_scale:,g}" if step.loss_scale != 1.0 else ""
        message = f"step {step.step}: loss {step.loss:g}, gradient norm {step.grad_norm:g}{scaled}"
        message += live.fault()
        if config.on_nonfinite == "stop":
            live.end(seat, message)
            return False
        seat.run.step = step.step
        seat.log.warn(f"skipped {message}")
    if step.outcome != "updated":
        seat.samples.skip(step.step, step.outcome)
    if seat.samples.faults_in_a_row(step.step) < config.max_skips:
        return True
    message = f"step {step.step}: {config.max_skips:,} batches in a row were skipped, as many as "
    live.end(seat, f"{message}train.max_skips allows")
    return False


def _give_up(seat: Seat, reason: str) -> None:
    """Raises MtcliError (exit 1), once the last save has ended."""
    seat.saver.wait()
    train = seat.run.config.train
    folder = Path(train.output)
    if train.on_nonfinite == "skip":
        raise failed(reason, f"{how_it_goes_on(folder)}, and a lower optimizer.lr or other data")
    hint = "lower optimizer.lr, look at the samples, or set train.on_nonfinite = 'skip'"
    raise failed(reason, f"{newest_saved(folder)}; {hint}")
