"""Trains an array of trials, with the run folder, records and checkpoints of each model.

A model that diverges or is stopped leaves the array, and its memory is freed.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from mtcli.core.checkpoint.run_progress import planned_samples
from mtcli.core.config.errors import collect_errors
from mtcli.core.config.schema import RunConfig
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.together import together
from mtcli.core.parallel.tree import Tree
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.outputs import require_no_link
from mtcli.core.sweep.array import ModelArray
from mtcli.core.sweep.batches import ArrayLoader
from mtcli.core.sweep.member import Member
from mtcli.core.sweep.record import ArrayRecord, Status, TrialRecord
from mtcli.core.sync.traffic import REDUCED, SyncTraffic
from mtcli.core.training.loader import MicroBatchLoader, open_loader
from mtcli.core.training.loop import Live, Seat, drive, save
from mtcli.core.training.metrics import RunRecords
from mtcli.core.training.run_lock import lock_folder
from mtcli.core.training.save import Saver, saving_ranks
from mtcli.core.training.save_schedule import SaveSchedule
from mtcli.core.training.state import (
    StartingPoint,
    restore,
    starting_notes,
    starting_point,
    with_tokenizer,
)
from mtcli.core.training.step import Step, run_groups
from mtcli.core.training.validation import ValidationLosses
from mtcli.core.training.validation_sets import (
    SetLosses,
    ValidationSets,
    open_validation,
    token_bytes,
)

DIVERGED = 10.0  # times the loss of a uniform guess, ln(vocab_size), from which no run comes back


class Watcher(NamedTuple):
    """The callbacks by which a sweep follows an array that trains."""

    say: Callable[[str], None]
    stepped: Callable[[Sequence[TrialRecord], float], None]  # each step, and tokens per second
    ended: Callable[[TrialRecord], object]
    stops: Callable[[], bool]  # whether this rank was told to stop


class LiveArray:
    """Some trials' models, from the seed or their newest checkpoints on. Use it as a context."""

    def __init__(self, trials: Sequence[TrialRecord], runtime: Runtime, watcher: Watcher) -> None:
        """All trials are at the same step."""
        configs = [record.trial.config for record in trials]
        self.watcher, self.runtime, self.config = watcher, runtime, configs[0]
        self.groups = run_groups(self.config, runtime)
        world = self.groups.world
        traffic = world.recorder.sync_traffic = SyncTraffic(REDUCED)
        self.stack, self.locks = ExitStack(), dict[str, ExitStack]()
        together(world, lambda: self._lock(configs, world))
        starts = _starting_points(configs, world)
        configs = [with_tokenizer(*pair) for pair in zip(configs, starts, strict=True)]
        for note in starting_notes(configs[0], starts[0]):
            watcher.say(note)
        self.array = ModelArray(configs, self.groups)
        self.loader, self.valid = together(world, lambda: self._loaders(configs, starts))
        self.stack.callback(lambda: self.loader.close())
        described = [loader.batches.describe() for loader in dict.fromkeys(self.loader.loaders)]
        for name, text in dict.fromkeys(pair for lines in described for pair in lines.items()):
            watcher.say(f"{name:<7}{text}")
        saving = saving_ranks(self.groups)
        members = zip(self.array.members, starts, self.loader.loaders, strict=True)
        seats = [self._seat(*member, saving) for member in members]
        self.live = Live(
            seats,
            SaveSchedule(self.config.train),
            traffic,
            train_step=lambda: self.array.train_step(self.loader),
            evaluate=lambda: self.valid.evaluate(self.array.evaluate),
            stops=watcher.stops,
            end=self._end,
            after=self._after,
            stepped=self._stepped,
        )
        self.savers = [seat.saver for seat in seats]
        self.records = {record.name: record for record in trials}
        for record in trials:
            record.status = "running"
        self.first_step, self.seconds, self.tokens, self.clock = self.array.step, 0.0, 0.0, 0.0

    def __enter__(self) -> "LiveArray":
        return self

    def __exit__(self, *error: Any) -> None:
        self.valid.close()
        self.stack.__exit__(*error)

    @property
    def running(self) -> list[TrialRecord]:
        """The records of the trials whose models are left."""
        return [self.records[_name(seat)] for seat in self.live.seats]

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's weights, gradients and optimizer state."""
        return self.array.memory.bytes

    def train(self, until: int) -> bool:
        """Trains to a step, or until no model is left; returns False where a rank was told to stop.

        Saves models as a run alone does: by the schedule, at the last step, and at a stop.
        """
        self.clock = perf_counter()
        return drive(self.live, until)

    def _stepped(self, seat: Seat, step: Step, losses: SetLosses | None) -> bool:
        """Records a step of a trial; whether the trial goes on, as its loss is not too high."""
        record = self.records[_name(seat)]
        highest = DIVERGED * math.log(self.config.model.vocab_size)
        record.losses.append(step.loss)
        record.lr = step.lr
        if losses is not None:
            record.valid_loss = losses.loss
        if diverged := step.loss > highest:
            message = f"step {step.step}: loss {step.loss:g} is above {highest:.1f}, "
            self._end(seat, f"{message}{DIVERGED:g} times that of a uniform guess")
        return not diverged

    def _after(self, steps: Sequence[Step], going: Sequence[bool], stopped: bool) -> None:
        """Goes on without the models that ended, and shows the step."""
        self._leave([index for index, goes in enumerate(going) if not goes])
        tokens, now = sum(step.tokens for step in steps), perf_counter()
        self.seconds, self.tokens = self.seconds + now - self.clock, self.tokens + tokens
        self.clock = now
        self.watcher.stepped(self.running, tokens / steps[0].seconds)

    def stop(self, names: Sequence[str], reason: str) -> None:
        """Ends some trials, which are saved as they are."""
        seats = self.live.seats
        ended = [i for i, seat in enumerate(seats) if _name(seat) in names]
        for index in ended:
            seats[index].save()
            self._end(seats[index], reason, "stopped")
        self._leave(ended)

    def save(self) -> None:
        """Begins to save every model."""
        save(self.live.seats, self.live.saves)

    def finish_saves(self) -> None:
        """Waits for the saves of all models, also of models that left the array.

        Raises MtcliError for all models whose last save failed.
        """
        collect_errors(*(saver.finish for saver in self.savers))

    def facts(self) -> ArrayRecord:
        """The record of the array for sweep.json."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        last = self.array.step if self.live.seats else self.first_step
        steps = self.first_step, last
        return ArrayRecord([*self.records], *steps, self.seconds, rate, self.state_bytes)

    def _end(self, seat: Seat, reason: str, status: Status = "diverged") -> None:
        record = self.records[_name(seat)]
        record.end(status, reason)
        self.watcher.say(f"{record.name}: {status}, {reason}")
        self.watcher.ended(record)

    def _leave(self, ended: Sequence[int]) -> None:
        """Goes on without some models, once their saves have ended."""
        seats = self.live.seats
        for index in ended:
            seat = seats[index]
            seat.saver.wait()
            seat.log.close()
            if self.runtime.rank == 0:  # which holds the folders
                self.locks[_name(seat)].close()
        keep = [i for i in range(len(seats)) if i not in ended]
        self.live.seats = [seats[i] for i in keep]
        self.loader.compact(keep)
        for loader in self.valid.loaders.values():
            loader.compact(keep)
        if keep:
            self.array.compact(keep)

    def _seat(
        self, member: Member, start: StartingPoint, loader: MicroBatchLoader, saving: Tree
    ) -> Seat:
        samples, last_good, base = restore(member, loader, start, self.runtime.local_rank)
        name, say = Path(member.config.train.output).name, self.watcher.say
        first = self.runtime.rank == 0
        log = RunRecords(member.config, first, lambda text: say(f"{name}: {text}"))
        log.begin(self.runtime, member.step)
        self.stack.callback(log.close)
        saver = self.stack.enter_context(Saver(member, log, last_good, saving))
        validation = ValidationLosses(member.config.train, start)
        return Seat(member, samples, log, saver, base, validation)

    def _lock(self, configs: Sequence[RunConfig], world: Axis) -> None:
        if world.rank:
            return

        def take(config: RunConfig) -> None:
            stack = self.stack.enter_context(ExitStack())
            folder = Path(config.train.output)
            require_no_link(folder, "--output")
            notice = stack.enter_context(lock_folder(folder, resume=True, anew=True))
            self.locks[folder.name] = stack
            if notice:
                self.watcher.say(f"note: {notice}")

        collect_errors(*(partial(take, config) for config in configs))

    def _loaders(
        self, configs: Sequence[RunConfig], starts: Sequence[StartingPoint]
    ) -> tuple[ArrayLoader, ValidationSets[ArrayLoader]]:
        """Opens training data, once for each order, and validation sets if train.eval_every."""
        dropping = max(configs, key=_most_dropped)  # tokens are numbered where any model drops some
        drops = {"model": dropping.model, "lora": dropping.lora}
        train: dict[tuple[int, int | None], MicroBatchLoader] = {}
        loaders = []
        for config, start in zip(configs, starts, strict=True):
            planned = planned_samples(start.checkpoint) if start.step and start.checkpoint else None
            key = config.data_seed, planned
            if key not in train:
                numbered = config.model_copy(update=drops)
                train[key] = open_loader(numbered, self.groups, planned=planned)
            loaders.append(train[key])
        seeds = {config.data_seed: config for config in configs}
        valid = {seed: open_validation(config, self.groups) for seed, config in seeds.items()}
        first = valid[configs[0].data_seed]
        arrays = {
            name: ArrayLoader([valid[config.data_seed][name] for config in configs])
            for name in first
        }
        of_tokens = token_bytes(self.config, first)
        return ArrayLoader(loaders), ValidationSets(arrays, of_tokens, self.config.train.best_of)


def _name(seat: Seat) -> str:
    """The trial's name, which its run folder has."""
    return Path(seat.run.config.train.output).name


def _most_dropped(config: RunConfig) -> float:
    """The largest of a config's probabilities of dropout."""
    return max(config.model.dropout, config.model.attention_dropout, config.lora.dropout)


def _starting_points(configs: Sequence[RunConfig], world: Axis) -> list[StartingPoint]:
    """Finds where each model of an array starts: at its own checkpoint, or all at the same weights,
    which are opened and verified once."""
    first = starting_point(configs[0], world)
    return [first, *(starting_point(c, world) if first.is_own else first for c in configs[1:])]
