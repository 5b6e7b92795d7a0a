"""The state of a sweep on this rank: its trials' records, its arrays and its files."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from mtcli.core.checkpoint.folder import find_checkpoint
from mtcli.core.checkpoint.opening import open_folder
from mtcli.core.config.errors import collect_errors
from mtcli.core.config.schema import RunConfig
from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.groups import world_axis
from mtcli.core.parallel.together import together
from mtcli.core.runtime.launch import Runtime, StopSignal
from mtcli.core.sweep import record as records_of
from mtcli.core.sweep.board import Board
from mtcli.core.sweep.capacity import capacity
from mtcli.core.sweep.live import LiveArray, Watcher
from mtcli.core.sweep.record import ArrayRecord, TrialRecord
from mtcli.core.sweep.rules import trains_in_turn
from mtcli.core.sweep.run_plan import SweepPlan, plan_notes, planned
from mtcli.core.sweep.settings import AtEnd, at_ends, settings_of
from mtcli.core.sweep.trials import Trial, partitions
from mtcli.core.training.run_lock import PATIENCE, is_continued, lock_folder
from mtcli.core.training.state import require_same_run

STOP_FILE = "stop"  # in the sweep's folder: it is told to stop where there is one


class Sweep:
    """The state of a sweep on this rank; `run.py` trains its trials in order."""

    def __init__(self, plan: SweepPlan, runtime: Runtime) -> None:
        self.plan, self.runtime = plan, runtime
        self.world = world_axis(runtime.rank, runtime.world, runtime.recorder)
        self.signal = StopSignal()
        self.resumes = self._was_started_before() or plan.request.resume
        self.records = self._records()
        self.by_name = {record.name: record for record in self.records}
        self.arrays: list[ArrayRecord] = []
        self.interrupted = False
        steps = [record.trial.config.train.steps for record in self.records]
        if plan.sampling:
            steps = [plan.trials[0].config.train.steps] * plan.sampling.trials
        self.board = Board(self.records, plan.output, sum(steps), speaks=runtime.rank == 0)
        self.watcher = Watcher(
            self.board.say, self.board.stepped, lambda _: self.write(), self._stops
        )

    def write(self) -> dict[str, Any]:
        """Writes sweep.json; returns its content."""
        facts = {"output": str(self.plan.output), **self.plan.request.flags()}
        facts |= {"arrays": [array._asdict() for array in self.arrays]}
        if self.runtime.rank:
            return facts
        facts["settings"] = [setting.as_json() for setting in settings_of(self.records)]
        facts["at_ends"] = [end._asdict() for end in self.at_ends()]
        return records_of.write(self.plan.output, facts, self.records)

    def at_ends(self) -> list[AtEnd]:
        """The fields whose best value is at an end of those tried."""
        plan = self.plan
        return at_ends(self.records, plan.varied, plan.draws, plan.space.is_legal)

    def _was_started_before(self) -> bool:
        """Whether an earlier attempt of this launch trained the sweep, as rank 0 finds it.

        Waits until that attempt's ranks have released the trials' folders: read these afterwards.
        Raises MtcliError on every rank where they do not.
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

    def proposed(self, points: Sequence[Mapping[str, Any]]) -> list[Trial]:
        """The trials of a sampler's values, whose records join the sweep's."""
        shared, world = self.plan.request.shared_batches, self.runtime.world
        trials = planned(self.plan.space.checked(points, shared, world), resume=True)
        new = [trial for trial in trials if trial.name not in self.by_name]
        self.records += self._restored(new)
        self.by_name |= {record.name: record for record in self.records}
        return trials

    def opened(self, array: Sequence[TrialRecord]) -> LiveArray:
        """Builds an array of some trials, at their newest checkpoints; `close` records its end."""
        live = LiveArray(array, self.runtime, self.watcher)
        self.board.begin(live, self.runtime.world)
        self.write()
        return live

    def close(self, live: LiveArray) -> None:
        """Records what an array has trained, and which of its models are finished.

        Raises MtcliError where the last save of any failed.
        """
        live.finish_saves()
        for record in live.running:
            finished = len(record.losses) >= record.trial.config.train.steps
            record.end("finished" if finished else "waiting")
        self.arrays.append(live.facts())
        self.write()

    def packed(self, group: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
        """Packs trials at the same step into arrays, as many to an array as fit."""
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
        """The models that an array of a config takes on the rank with least memory."""
        models: list[int] = gather_values(capacity(config, self.runtime), self.world)
        return min(models)

    def partitions(self) -> list[list[TrialRecord]]:
        """The trials in groups that arrays can fuse; each group is trained separately."""
        groups = partitions(self.plan.trials)
        return [[self.by_name[trial.name] for trial in group] for group in groups]

    def notes(self) -> list[str]:
        """Notes on surprises: fewer trials, several sets, no fusion, trials that have ended."""
        notes = plan_notes(self.plan)
        device = self.runtime.device.type
        large = any(trains_in_turn(trial.config, device) for trial in self.plan.trials)
        if large and not self.plan.request.max_fused:
            what = "models whose GEMMs fill a CPU core are trained one after another"
            notes.append(f"{what}: --max-fused B fuses")
        if ended := sum(record.ended for record in self.records):
            count = f"{ended} of {len(self.records)} trials have ended before"
            notes.append(f"note: {count}, and stay as they are")
        return notes

    def clear_stop_file(self) -> None:
        """Removes the file that tells the sweep to stop, before any rank looks for it again."""
        stop = self.plan.output / STOP_FILE
        if self.runtime.rank == 0 and stop.is_file():
            stop.unlink(missing_ok=True)
        gather_values(None, self.world)

    def _stops(self) -> bool:
        return self.signal.received > 0 or (self.plan.output / STOP_FILE).is_file()


def _require_same(config: RunConfig) -> None:
    source = find_checkpoint(Path(config.train.output))
    require_same_run(config, open_folder(source, alone=True))
