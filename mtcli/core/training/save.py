"""Asynchronous saves: a snapshot in host memory, and a thread that writes and commits it.

Training stands still for the snapshot, and for a save that is unfinished when the next one, or the
end of the run, comes. The threads of all ranks exchange through process groups of their own, which
no collective of a step uses. A save that fails leaves the run going.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

from mtcli.core.checkpoint.async_save import HostCopy, Snapshot, on_host
from mtcli.core.checkpoint.fine_tuning import starting_folder
from mtcli.core.checkpoint.folder import CHECKPOINTS, HUGGINGFACE, require_inside
from mtcli.core.checkpoint.huggingface.json_files import CONFIG_JSON, GENERATION_JSON
from mtcli.core.checkpoint.retention import Best
from mtcli.core.checkpoint.run_progress import RunProgress
from mtcli.core.checkpoint.store import save, save_together
from mtcli.core.config.errors import Exit, MtcliError, failed
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.schema import RunConfig
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.tree import Tree, make_tree
from mtcli.core.runtime.health.flight_recorder import SAVING
from mtcli.core.training.metrics import RunRecords, SaveRecord
from mtcli.core.training.run_log import RunLog
from mtcli.core.training.run_tokenizer import run_tokenizer
from mtcli.core.training.state import RunState, saved_replicas, shards

RUINED = "holds a value that is not finite"


class BackgroundWrite:
    """A save under way in a thread."""

    def __init__(self, work: Callable[[], SaveRecord]) -> None:
        self._future: Future[SaveRecord] = Future()
        self._thread = Thread(target=self._run, args=(work,), name="mtcli-save", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def result(self) -> SaveRecord:
        """Returns its result, or raises its error, once it has ended.

        The thread has ended too: one that frees tensors while the interpreter ends aborts it.
        """
        self._thread.join()
        return self._future.result()

    def _run(self, work: Callable[[], SaveRecord]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:
            self._future.set_exception(error)


class Saver:
    """The saves of a run. Every rank makes the same calls."""

    def __init__(
        self,
        trainer: RunState,
        log: RunLog | RunRecords,
        last_good: Path | None,
        ranks: Tree | None = None,
    ) -> None:
        """Several savers that save in turn share the `ranks` of `saving_ranks`; over more than one
        rank, training then stands still until a save is written."""
        self.trainer, self.log, self.last_good = trainer, log, last_good
        self.config: RunConfig = log.config  # with all phases
        self.ranks = saving_ranks(trainer.groups) if ranks is None else ranks
        self.waits = ranks is not None and trainer.groups.world.size > 1
        self.note_progress = trainer.groups.world.recorder.note_progress
        self.snapshot = Snapshot(trainer.groups.device)
        self.replicas = saved_replicas(trainer)
        self.pending: BackgroundWrite | None = None
        self.step = 0  # of the save that is pending, or else of the last one
        self.fault = ""  # of the last save
        self.stall_seconds = 0.0  # in which training stood still for the last good one
        self.warned: set[str] = set()

    def __enter__(self) -> "Saver":
        if self.config.train.async_save:
            self.snapshot.reserve(shards(self.trainer))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error waits for the save in flight, which may be the last good one.

        A second signal ends the process here without waiting, as the thread cannot be ended.
        """
        self.snapshot.close()
        if self.pending is None or kind is None:
            return
        if not issubclass(kind, Exception):
            os._exit(Exit.INTERRUPTED)
        with suppress(RuntimeError):  # the ranks' agreement broke: as the error that is raised says
            self._collect(training=False)

    def save(self, progress: RunProgress) -> None:
        """Begins to save the trainer's state, and returns when the state may change again.

        Raises RuntimeError where the ranks of the previous save could not agree: one has died.
        """
        self._collect()
        start, config = perf_counter(), self.config.train
        self.step = self.trainer.step
        keep = self.snapshot.take if config.async_save else on_host
        try:
            taken = keep(shards(self.trainer))
        except MemoryError as error:
            taken = _unheld(str(error))
        stall = perf_counter() - start
        evaluated = progress.validation.best if progress.validation else ()
        best = Best(config.keep_best, tuple(entry.step for entry in evaluated))
        facts = (self.step, progress.model_dump(), best, stall)
        self.pending = BackgroundWrite(lambda: self._write(taken, *facts))
        if self.waits or not config.async_save:
            self._collect()

    def poll(self) -> None:
        """Logs a save that has ended since the last call."""
        if self.pending is not None and self.pending.is_done():
            self._collect()

    def wait(self) -> None:
        """Waits for the save in flight; one that fails is logged, and leaves the run going."""
        self._collect(training=False)

    def finish(self) -> None:
        """Waits for the save in flight. Raises MtcliError where the last one failed."""
        self.wait()
        if self.fault:
            good = f"the last good checkpoint is {self.last_good}"
            good = good if self.last_good else "there is no good checkpoint"
            cure = "lower optimizer.lr" if RUINED in self.fault else "free some space"
            cure += ", and --resume" if self.last_good else ", and --start-over"
            raise failed(f"step {self.step}: {self.fault}", f"{good}; {cure}")

    def _collect(self, training: bool = True) -> None:
        """Waits for the save in flight and logs how it ended; `training` counts it as stall."""
        if self.pending is None:
            return
        pending, self.pending, start = self.pending, None, perf_counter()
        try:
            record = pending.result()
        except MtcliError as error:
            self.fault = error.problems[0].message
            self.log.save_failed(self.step, self.fault, self.last_good)
            return
        self.fault, self.last_good = "", record.folder
        self.stall_seconds = record.stall_seconds + (perf_counter() - start) * training
        self.log.saved(record._replace(stall_seconds=self.stall_seconds))

    def _write(
        self, taken: HostCopy, step: int, extra: dict[str, Any], best: Best, stall: float
    ) -> SaveRecord:
        """Writes a snapshot in the thread, which shares only its arguments with training."""
        start, config, ranks = perf_counter(), self.config, self.ranks
        device_seconds = save_together(ranks, partial(_sound, taken))
        folder = save(
            Path(config.train.output) / CHECKPOINTS,
            step,
            taken.shards,
            ranks=ranks,
            progress=self.note_progress,
            extra=extra,
            config_toml=dump_toml(config),
            tokenizer=run_tokenizer(config),
            attached=_original_configs(config),
            keep=config.train.keep,
            keep_every=config.train.keep_every,
            best=best,
            replicas=self.replicas,
            warn=self._warn_once,
        )
        num_bytes = sum(shard.tensor.nbytes for shard in taken.shards)
        costs = [num_bytes, max(stall, device_seconds), perf_counter() - start]
        return SaveRecord(step, folder, *ranks.tell(ranks.merge(costs, _slowest)))

    def _warn_once(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            self.log.warn(text)


def _sound(taken: HostCopy) -> float:
    """Waits for a snapshot; returns the seconds that its device took.

    Raises MtcliError where a value is not finite: such a checkpoint would replace a good one. The
    check takes 0.1 s per GB.
    """
    seconds = taken.wait()
    for name, tensor, *_ in taken.shards:
        if tensor.is_floating_point() and tensor.numel():
            low, high = tensor.aminmax()  # a NaN is both
            if not math.isfinite(float(low)) or not math.isfinite(float(high)):
                raise failed(f"{name} {RUINED}")
    return seconds


def saving_ranks(groups: Groups) -> Tree:
    """All ranks, with process groups for the threads that save."""
    recorder = groups.world.recorder.beside()
    return make_tree(groups.world._replace(name=SAVING, transport=None, recorder=recorder))


def _slowest(of_ranks: list[list[Any]]) -> list[Any]:
    """[bytes of all ranks, stall of the slowest, write seconds of the slowest]."""
    sizes, stalls, seconds = zip(*of_ranks, strict=True)
    return [sum(sizes), max(stalls), max(seconds)]


def _unheld(reason: str) -> HostCopy:
    """A stand-in for the snapshot of a rank without memory; its wait raises MtcliError."""

    def wait() -> float:
        raise failed(f"there is no room for a snapshot of {reason}")

    return HostCopy([], wait)


def _original_configs(config: RunConfig) -> dict[str, Path]:
    """config.json and generation_config.json of the weights that the run started from, by their
    names in a checkpoint."""
    start = starting_folder(config)
    if start is None or start.format in ("megatron", "dcp"):
        return {}
    folder = start.folder if start.format == "hf" else start.folder / HUGGINGFACE
    paths = (folder / CONFIG_JSON, folder / GENERATION_JSON)
    return {
        f"{HUGGINGFACE}/{path.name}": require_inside(start.folder, path)
        for path in paths
        if path.is_file()
    }
