"""`mtcli sweep`: the trials, as arrays one after another, from their first step to their last.

The trials that one array can train are packed into as few arrays as memory allows. With Hyperband a
rung's trials are packed anew from those that are left, unless they are all in one array: that goes
on with the rows that are left.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import collect_errors
from mtcli.core.config.schema import RunConfig
from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.groups import world_axis
from mtcli.core.parallel.together import together
from mtcli.core.plan.hardware import GPUS, HERE, Device, shared
from mtcli.core.plan.memory import frozen_bytes, memory
from mtcli.core.plan.workload import Workload
from mtcli.core.runtime.launch import Runtime, StopSignal
from mtcli.core.sweep import record as records_of
from mtcli.core.sweep.board import Board
from mtcli.core.sweep.live import LiveArray, Watcher
from mtcli.core.sweep.record import ArrayRecord, TrialRecord
from mtcli.core.sweep.rules import trains_in_turn
from mtcli.core.sweep.run_plan import SweepPlan, plan_notes, planned
from mtcli.core.sweep.sampling import Proposals, SamplingPlan
from mtcli.core.sweep.stopping import Hyperband, Rung, below_median, best
from mtcli.core.sweep.trials import Trial, name_of, partitions
from mtcli.core.training.run_lock import PATIENCE, is_continued, lock_folder
from mtcli.core.training.state import require_same_run

MOST_ASKED = 8  # trials that a sampler is asked for at once, which know nothing of each other
STOP_FILE = "stop"  # in the sweep's folder: it is told to stop where there is one


class Sweep:
    """A sweep under way on this rank."""

    def __init__(self, plan: SweepPlan, runtime: Runtime, peak: float) -> None:
        self.plan, self.runtime, self.peak = plan, runtime, peak
        self.world = world_axis(runtime.rank, runtime.world, runtime.recorder)
        self.signal = StopSignal()
        self.resumes = self._was_started_before() or plan.request.resume
        self.records = self._records()
        self.by_name = {record.name: record for record in self.records}
        self.arrays: list[ArrayRecord] = []
        self.interrupted = False
        every = [record.trial.config.train.steps for record in self.records]
        if plan.sampling:
            every = [plan.trials[0].config.train.steps] * plan.sampling.trials
        self.board = Board(self.records, plan.output, sum(every), speaks=runtime.rank == 0)
        self.watcher = Watcher(
            self.board.say, self.board.stepped, lambda _: self.write(), self._stops
        )

    def run(self) -> bool:
        """Trains all trials to their ends; returns False where it was told to stop, and saved."""
        self._clear_stop_file()
        with self.board:
            for note in [*plan_notes(self.plan), *self._size_notes(), *self._end_notes()]:
                self.board.say(note)
            if self.plan.sampling:
                self._sample(self.plan.sampling)
                return self._ended()
            for group in self._partitions():
                if self.plan.hyperband:
                    self._hyperband(group, self.plan.hyperband)
                else:
                    self._train_all(group)
        return self._ended()

    def _size_notes(self) -> list[str]:
        """Says where models are no array for their size."""
        device = self.runtime.device.type
        large = any(trains_in_turn(trial.config, device) for trial in self.plan.trials)
        if self.plan.request.max_fused or not large:
            return []
        return [
            "models whose GEMMs fill a CPU core are trained one after another: --max-fused B fuses"
        ]

    def _end_notes(self) -> list[str]:
        """Says which trials are not trained, whatever the command line says of them now."""
        ended = sum(record.ended for record in self.records)
        whole = f"{ended} of {len(self.records)} trials have ended before, and stay as they are"
        return [f"note: {whole}"] if ended else []

    def _ended(self) -> bool:
        """Writes the last records; returns whether all trials ended."""
        self.write()
        self._clear_stop_file()
        return not self.interrupted

    def write(self) -> dict[str, Any]:
        """Writes sweep.json; returns what it holds."""
        about = {"output": str(self.plan.output), **self.plan.request.flags()}
        about |= {"arrays": [array._asdict() for array in self.arrays]}
        if self.runtime.rank:
            return about
        return records_of.write(self.plan.output, about, self.records)

    def _was_started_before(self) -> bool:
        """Whether the launcher starts this sweep's ranks again, as rank 0 finds it.

        What is read of the trials comes after this: first a rank of an earlier attempt that holds
        any of their folders ends. Raises MtcliError on every rank where it does not.
        """
        attempt, timeout = self.runtime.attempt, self.plan.trials[0].config.train.timeout
        end = monotonic() + PATIENCE * timeout

        def outlive_earlier() -> bool:
            folders = self.plan.output.iterdir() if self.world.rank == 0 else ()
            continued = [folder for folder in folders if is_continued(folder, attempt)]
            for folder in continued:
                with lock_folder(folder, True, attempt, end - monotonic()) as notice:
                    sys.stderr.write(f"note: {notice}\n" if notice else "")
            return bool(continued)

        return bool(gather_values(together(self.world, outlive_earlier), self.world)[0])

    def _records(self) -> list[TrialRecord]:
        """The records of all trials, as rank 0 finds them."""
        plan = self.plan

        def found() -> list[TrialRecord]:
            if not (plan.sampling and self.resumes):  # the trials that it had are the study's
                records_of.require_startable(plan.trials, plan.output, self.resumes)
            return [] if plan.sampling else self._restored(plan.trials, plan.hyperband is None)

        return together(self.world, found)

    def _restored(self, trials: Sequence[Trial], keeps_stopped: bool = True) -> list[TrialRecord]:
        """The records of trials as an earlier start left them. Raises MtcliError where one that is
        not to be trained on was of another config."""
        records = records_of.restored(trials, self.plan.output, keeps_stopped)
        ended = [record.trial for record in records if record.ended]
        saved = [trial.config for trial in ended if records_of.saved_step(trial)]
        collect_errors(*(partial(_require_same, config) for config in saved))
        return records

    def _partitions(self) -> list[list[TrialRecord]]:
        return [
            [self.by_name[trial.name] for trial in group] for group in partitions(self.plan.trials)
        ]

    def _sample(self, sampling: SamplingPlan) -> None:
        """Trains the trials that a sampler proposes, as many at a time as one array takes."""
        speaks = self.runtime.rank == 0
        study = together(
            self.world, lambda: Proposals(sampling, self.plan.output) if speaks else None
        )
        shape = self.plan.trials[0].config
        size = self.plan.request.max_fused or min(self.capacity(shape), MOST_ASKED)
        self._proposed(gather_values(study.done() if study else None, self.world)[0])
        while not self.interrupted:
            own = study.ask(size) if study else None
            asked = gather_values(own, self.world)[0]
            if not asked:
                return
            trials = self._proposed([values for _, values in asked])
            for group in partitions(trials):
                self._train_all([self.by_name[trial.name] for trial in group])
            for number, values in asked:
                record = self.by_name[name_of(values)]
                if study and record.ended:
                    study.tell(number, None if record.status == "diverged" else record.score)

    def _proposed(self, points: Sequence[Mapping[str, Any]]) -> list[Trial]:
        """The trials of a sampler's values, whose records join the sweep's."""
        shared, world = self.plan.request.shared_batches, self.runtime.world
        trials = planned(self.plan.space.checked(points, shared, world), resume=True)
        new = [trial for trial in trials if trial.name not in self.by_name]
        self.records += self._restored(new)
        self.by_name |= {record.name: record for record in self.records}
        return trials

    def _train_all(self, group: Sequence[TrialRecord]) -> None:
        """Trains a partition's trials, one array after another."""
        for array in self._packed([record for record in group if not record.ended]):
            if self.interrupted:
                return
            with self._opened(array) as live:
                self._to_the_end(live)

    def _to_the_end(self, live: LiveArray) -> None:
        """Trains to the end of the run, with the median rule at its steps: before the next one, as
        a sweep may have been told to stop at one of them."""
        steps, every = live.shape.train.steps, self.plan.request.median
        while live.seats and not self.interrupted and live.array.step < steps:
            step, until = live.array.step, steps
            if every:
                self._apply_median(live, step, every)
                until = min(steps, (step // every + 1) * every)
            self.interrupted = not live.train(until)
        self._close(live)

    def _apply_median(self, live: LiveArray, step: int, every: int) -> None:
        if step == 0 or step % every:
            return
        losses = {record.name: record.losses for record in self.records}
        here = {seat.record.name for seat in live.seats}
        stopped = [n for n in below_median(losses, step, every) if n in here]
        if stopped:
            live.stop(stopped, f"above the median of the others at step {step}")

    def _hyperband(self, group: Sequence[TrialRecord], rule: Hyperband) -> None:
        """Trains the brackets, each of trials of its own as long as there are any."""
        left = list(group)
        for number, rungs in enumerate(rule.brackets(group[0].trial.config.train.steps)):
            bracket, left = left[: rungs[0].trials], left[rungs[0].trials :]
            if bracket and not self.interrupted:
                self._bracket(bracket, rungs, f"bracket {number + 1}")

    def _bracket(self, bracket: list[TrialRecord], rungs: Sequence[Rung], name: str) -> None:
        """Trains a bracket, rung by rung; an array that has all of a rung's trials goes on."""
        going, done, live = bracket, 0, None
        with ExitStack() as stack:
            for rung, after in zip(rungs, [*rungs[1:], None], strict=True):
                if live is None and self._fits_one(going, rung.step):
                    live = stack.enter_context(self._opened(going))
                if live:
                    self.interrupted = not live.train(rung.step)
                else:
                    self._train_apart(going, rung.step)
                if self.interrupted or after is None:
                    break
                count = max(1, len(bracket) * after.trials // rungs[0].trials)
                reason = f"not among the best {count} of {len(going)} at step {rung.step}, {name}"
                going = self._keep_best(going, live, (count, rung.step, done), reason)
                done = rung.step
            if live:
                self._close(live)

    def _fits_one(self, going: Sequence[TrialRecord], until: int) -> bool:
        """Whether one array takes all of these trials, which have not got to a step."""
        arrays = self._packed([r for r in going if len(r.losses) < until and not r.ended])
        return len(arrays) == 1 and len(arrays[0]) == len(going)

    def _train_apart(self, going: Sequence[TrialRecord], until: int) -> None:
        """Trains the trials that have not got to a step in arrays of their own, and saves them."""
        for array in self._packed([r for r in going if len(r.losses) < until and not r.ended]):
            if self.interrupted:
                return
            with self._opened(array) as live:
                self.interrupted = not live.train(until)
                if not self.interrupted and until < live.shape.train.steps:
                    live.save()
                self._close(live)

    def _keep_best(
        self,
        going: Sequence[TrialRecord],
        live: LiveArray | None,
        rung: tuple[int, int, int],
        reason: str,
    ) -> list[TrialRecord]:
        """Stops all but the best `count` at a step, by their losses since `done`."""
        count, step, done = rung
        losses = {r.name: r.losses for r in going if r.status != "diverged"}
        winners = best(losses, step, count, step - done)
        losers = [name for name in losses if name not in winners]
        if live:
            live.stop(losers, reason)
        else:
            for name in losers:
                self.by_name[name].end("stopped", reason)
            self.write()
        return [self.by_name[name] for name in winners]

    def _opened(self, array: Sequence[TrialRecord]) -> LiveArray:
        live = LiveArray(array, self.runtime, self.peak, self.watcher)
        self.board.begin(live, self.runtime.world)
        self.write()
        return live

    def _close(self, live: LiveArray) -> None:
        """Records what an array has trained, and which of its models are finished.

        Raises MtcliError where the last save of any failed.
        """
        live.finish_saves()
        for seat in live.seats:
            record = seat.record
            finished = len(record.losses) >= record.trial.config.train.steps
            record.end("finished" if finished else "waiting")
        self.arrays.append(live.facts())
        self.write()

    def _packed(self, group: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
        """The arrays of some trials: of those at the same step as many as fit."""
        by_step: dict[int, list[TrialRecord]] = {}
        for record in group:
            by_step.setdefault(records_of.saved_step(record.trial), []).append(record)
        packed = []
        for same in by_step.values():
            largest = max((r.trial.config for r in same), key=lambda config: config.lora.rank)
            most = self.plan.request.max_fused or self.capacity(largest)
            number = -(-len(same) // most)
            size = -(-len(same) // number)
            packed += [same[first : first + size] for first in range(0, len(same), size)]
        return packed

    def capacity(self, config: RunConfig) -> int:
        """The models of an array of such a config: what the rank with least memory takes."""
        return min(gather_values(capacity(config, self.runtime), self.world))

    def _stops(self) -> bool:
        return self.signal.received > 0 or (self.plan.output / STOP_FILE).is_file()

    def _clear_stop_file(self) -> None:
        stop = self.plan.output / STOP_FILE
        if self.runtime.rank == 0 and stop.is_file():
            stop.unlink(missing_ok=True)
        gather_values(None, self.world)


def _require_same(config: RunConfig) -> None:
    require_same_run(config, open_checkpoint(Path(config.train.output)))


def capacity(config: RunConfig, runtime: Runtime) -> int:
    """The models of an array: as many as the plan says that a rank has memory for, at least 1; 1
    where `trains_in_turn`.

    The weights that adapters are trained for are there once for all of them.
    """
    if trains_in_turn(config, runtime.device.type):
        return 1
    device, work = _device(runtime), Workload.of(config, runtime.world)
    once = device.reserved_bytes + frozen_bytes(work)
    each = memory(work, device).total - once
    return max(1, int((device.usable_bytes - once) / each))


def _device(runtime: Runtime) -> Device:
    """This rank's device as plans know it, with the memory that it has left."""
    if runtime.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(runtime.device)
        return replace(GPUS["h100"], memory_bytes=float(total), reserved_bytes=float(total - free))
    import psutil

    here = shared(HERE, runtime.local_world)
    left = psutil.virtual_memory().available / runtime.local_world
    return replace(here, memory_bytes=min(here.memory_bytes, left))
