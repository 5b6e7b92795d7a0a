"""An array under way: its models' run folders, records and checkpoints, from their start to a step.

A model that ends before the others, because it diverged or was stopped, leaves the array, and the
memory that it had is freed.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from mtcli.core.checkpoint.progress import BaseRecord, planned_samples
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
from mtcli.core.training.consumed_samples import ConsumedSamples, data_hashes
from mtcli.core.training.loader import MicroBatchLoader, open_loader
from mtcli.core.training.metrics import RunRecords, StepFacts
from mtcli.core.training.rank_times import agreed
from mtcli.core.training.run_lock import lock_folder
from mtcli.core.training.save import Saver, saving_ranks
from mtcli.core.training.save_schedule import SaveSchedule
from mtcli.core.training.state import (
    StartingPoint,
    base_record,
    progress,
    restore,
    starting_notes,
    starting_point,
    with_tokenizer,
)
from mtcli.core.training.step import Step, run_groups

DIVERGED = 10.0  # times the loss of a uniform guess, ln(vocab_size), from which no run comes back


class Seat(NamedTuple):
    """A model's place in an array: its run, its records and its saves."""

    record: TrialRecord
    member: Member
    samples: ConsumedSamples
    records: RunRecords
    saver: Saver
    base: BaseRecord | None  # the weights that its adapters are for


class Watcher(NamedTuple):
    """The callbacks by which a sweep follows an array that trains."""

    say: Callable[[str], None]
    stepped: Callable[[Sequence[TrialRecord], float], None]  # each step, and tokens per second
    ended: Callable[[TrialRecord], None]
    stops: Callable[[], bool]  # whether this rank was told to stop


class LiveArray:
    """Some trials' models, from the seed or their newest checkpoints on. Use it as a context."""

    def __init__(self, trials: Sequence[TrialRecord], runtime: Runtime, watcher: Watcher) -> None:
        """All trials have made as many steps."""
        configs = [record.trial.config for record in trials]
        self.watcher, self.runtime, self.shape = watcher, runtime, configs[0]
        self.groups = run_groups(self.shape, runtime)
        world = self.groups.world
        self.traffic = SyncTraffic(REDUCED)
        world.recorder.sync_traffic = self.traffic
        self.stack, self.locks = ExitStack(), {}
        together(world, lambda: self._lock(configs, world))
        starts = _starting_points(configs, world)
        configs = [with_tokenizer(*pair) for pair in zip(configs, starts, strict=True)]
        for note in starting_notes(configs[0], starts[0]):
            watcher.say(note)
        self.array = ModelArray(configs, self.groups)
        self.loader, self.valid = together(world, lambda: self._loaders(configs, starts))
        about = [loader.batches.describe() for loader in dict.fromkeys(self.loader.loaders)]
        for name, text in dict.fromkeys(pair for told in about for pair in told.items()):
            watcher.say(f"{name:<7}{text}")
        saving = saving_ranks(self.groups)
        pairs = zip(trials, self.array.members, starts, self.loader.loaders, strict=True)
        self.seats = [self._seat(*pair, saving) for pair in pairs]
        self.savers = [seat.saver for seat in self.seats]
        self.first_step, self.seconds, self.tokens = self.array.step, 0.0, 0
        self.names = [record.name for record in trials]
        self.saves, self.save_seconds = SaveSchedule(self.shape.train), 0.0  # of the last saves

    def __enter__(self) -> "LiveArray":
        return self

    def __exit__(self, *error: object) -> None:
        self.loader.close()
        if self.valid:
            self.valid.close()
        for seat in self.seats:
            seat.records.close()
        self.stack.close()

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's weights, gradients and optimizer state."""
        return self.array.memory.bytes

    def train(self, until: int) -> bool:
        """Trains to a step, or until no model is left; returns False where a rank was told to stop.

        Models are saved as a run alone would be: when its schedule says so, at their last step, and
        when they are told to stop.
        """
        stopped = False
        while self.seats and self.array.step < until and not stopped:
            start = perf_counter()
            steps = self.array.train_step(self.loader)
            told = self.watcher.stops(), self.saves.due_by_time(self.save_seconds)
            stopped, due, sent, _ = agreed(self.groups, *told, self.traffic.taken())
            ended = self._record(steps, sent // len(steps))
            if stopped or due or self.saves.due_by_step(self.array.step):
                self.save()
            if ended:
                self._leave(ended)
            tokens = sum(step.tokens for step in steps)
            self.seconds, self.tokens = self.seconds + perf_counter() - start, self.tokens + tokens
            self.watcher.stepped([seat.record for seat in self.seats], tokens / steps[0].seconds)
            for seat in self.seats:
                seat.saver.poll()
        for seat in self.seats:
            seat.saver.wait()
        return not stopped

    def stop(self, names: Sequence[str], reason: str) -> None:
        """Ends some trials, which are saved as they are."""
        ended = [i for i, seat in enumerate(self.seats) if seat.record.name in names]
        for index in ended:
            seat = self.seats[index]
            self._save(seat)
            self._end(seat, "stopped", reason)
        self._leave(ended)

    def save(self) -> None:
        """Begins to save every model whose run goes on; where ranks exchange for it, in turn."""
        start = perf_counter()
        for seat in self.seats:
            if seat.record.status != "diverged":
                self._save(seat)
        self.save_seconds = perf_counter() - start
        self.saves.saved()

    def _save(self, seat: Seat) -> None:
        seat.saver.save(progress(seat.member, seat.samples, seat.base))
        if self.groups.world.size > 1:
            seat.saver.wait()

    def finish_saves(self) -> None:
        """Waits for the saves of all models, those that left included.

        Raises MtcliError with those whose last one failed.
        """
        collect_errors(*(saver.finish for saver in self.savers))

    def facts(self) -> ArrayRecord:
        """Records what the array has trained."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        where = self.first_step, self.first_step
        if self.seats:
            where = self.first_step, self.array.step
        return ArrayRecord(self.names, *where, self.seconds, rate, self.state_bytes)

    def _record(self, steps: Sequence[Step], sent: int) -> list[int]:
        """Records a step of each model, for which so many bytes were sent; returns which models it
        ended."""
        valid: list[float | None] = [None] * len(steps)
        ended, every = [], self.shape.train.eval_every
        if self.valid and self.array.step % every == 0:
            valid = [*self.array.evaluate(self.valid)]
        for index, (seat, step) in enumerate(zip(self.seats, steps, strict=True)):
            if step.outcome == "fault" and seat.member.config.train.on_nonfinite == "stop":
                message = f"step {step.step}: loss {step.loss:g}, gradient norm {step.grad_norm:g}"
                self._end(seat, "diverged", message)
                ended.append(index)
                continue
            if step.outcome != "updated":
                seat.samples.skip(step.step, step.outcome)
            if (skips := seat.samples.faults_in_a_row(step.step)) >= self.shape.train.max_skips:
                message = f"step {step.step}: {skips:,} batches in a row were skipped"
                self._end(seat, "diverged", message)
                ended.append(index)
                continue
            seat.records.step(
                step, StepFacts(seat.member.consumed_samples, valid[index], sent, None)
            )
            seat.record.losses.append(step.loss)
            seat.record.lr = step.lr
            if valid[index] is not None:
                seat.record.valid_loss = valid[index]
            highest = DIVERGED * math.log(self.shape.model.vocab_size)
            if step.loss > highest:
                message = f"step {step.step}: loss {step.loss:g} is above {highest:.1f}, "
                message += f"{DIVERGED:g} times that of a uniform guess"
                self._end(seat, "diverged", message)
                ended.append(index)
        return ended

    def _end(self, seat: Seat, status: Status, reason: str) -> None:
        seat.record.end(status, reason)
        self.watcher.say(f"{seat.record.name}: {status}, {reason}")
        self.watcher.ended(seat.record)

    def _leave(self, ended: Sequence[int]) -> None:
        """Goes on without some models, once their saves have ended."""
        for index in ended:
            self.seats[index].saver.wait()
            self.seats[index].records.close()
            if self.runtime.rank == 0:  # which holds the folders
                self.locks[self.seats[index].record.name].close()
        keep = [i for i in range(len(self.seats)) if i not in ended]
        self.seats = [self.seats[i] for i in keep]
        self.loader.compact(keep)
        if self.valid:
            self.valid.compact(keep)
        if keep:
            self.array.compact(keep)

    def _seat(
        self,
        record: TrialRecord,
        member: Member,
        start: StartingPoint,
        loader: MicroBatchLoader,
        saving: Tree,
    ) -> Seat:
        hashes = data_hashes(loader.batches, self.runtime.local_rank, self.groups.world)
        samples = ConsumedSamples(member.config, loader.batches, hashes)
        last_good, base = restore(member, samples, start), base_record(member, start)
        records = RunRecords(member.config, self.runtime.rank == 0, self.watcher.say)
        records.begin(self.runtime, member.step)
        saver = self.stack.enter_context(Saver(member, records, last_good, saving))
        record.status = "running"
        return Seat(record, member, samples, records, saver, base)

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
    ) -> tuple[ArrayLoader, ArrayLoader | None]:
        """The data to train on, of each order once, and to validate on where that is asked for."""
        dropping = max(configs, key=_most_dropped)  # tokens are numbered where any model drops some
        drops = {"model": dropping.model, "lora": dropping.lora}
        train: dict[tuple[int, int | None], MicroBatchLoader] = {}
        each = []
        for config, start in zip(configs, starts, strict=True):
            planned = planned_samples(start.checkpoint) if start.step and start.checkpoint else None
            key = config.data_seed, planned
            if key not in train:
                numbered = config.model_copy(update=drops)
                train[key] = open_loader(numbered, self.groups, planned=planned)
            each.append(train[key])
        if not self.shape.train.eval_every:
            return ArrayLoader(each), None
        seeds = {config.data_seed: config for config in configs}
        valid = {
            seed: open_loader(config, self.groups, validation=True)
            for seed, config in seeds.items()
        }
        return ArrayLoader(each), ArrayLoader([valid[config.data_seed] for config in configs])


def _most_dropped(config: RunConfig) -> float:
    """The largest of a config's probabilities of dropout."""
    return max(config.model.dropout, config.model.attention_dropout, config.lora.dropout)


def _starting_points(configs: Sequence[RunConfig], world: Axis) -> list[StartingPoint]:
    """Finds where each model of an array starts: at its own checkpoint, or all at the same weights,
    which are opened and verified once."""
    first = starting_point(configs[0], world)
    return [first, *(starting_point(c, world) if first.is_own else first for c in configs[1:])]
