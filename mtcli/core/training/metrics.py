"""Writes a run's records: metrics.jsonl, events.jsonl and the values that trackers get."""

import json
import os
import resource
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from mtcli.core.checkpoint.folder import CHECKPOINTS
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.phases import phases_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import append_untrusted, is_number
from mtcli.core.mesh.parameters import training_flops
from mtcli.core.runtime.atomic_writes import folder_of, make_folder, write_text
from mtcli.core.runtime.json_text import finite
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.peak_flops import run_peak_flops
from mtcli.core.training.rank_times import RankTimes
from mtcli.core.training.run_folder import EVENTS, FACTS, METRICS, step_records
from mtcli.core.training.step import Step
from mtcli.core.training.trackers import Tracker, open_trackers
from mtcli.core.training.validation_sets import SetLosses


class SaveRecord(NamedTuple):
    """A checkpoint that was written; seconds are those of the slowest rank."""

    step: int
    folder: Path
    bytes: int  # of all ranks' tensors
    stall_seconds: float  # in which training stood still for it
    write_seconds: float  # until it was durable


class StepFacts(NamedTuple):
    """Facts that are recorded with a step, besides its result."""

    consumed_samples: int
    validation: SetLosses | None  # of the average of replicas, where it was asked for
    sync_bytes: int  # that all ranks sent each other for data parallelism
    replica_distance: float | None  # root mean square, from the average; None where all are equal
    ranks: RankTimes | None = None  # in steps at which ranks exchange them
    tasks: Mapping[str, float] = MappingProxyType({})  # figures of evaluation tasks


class RunRecords:
    """A run folder's record files and the run's trackers; only the first rank writes.

    `say` prints notes, and warnings of what could not be written.
    """

    def __init__(self, config: RunConfig, writes: bool, say: Callable[[str], None]) -> None:
        self.config, self.writes, self.say = config, writes, say
        self.span = phases_of(config)[0]  # the phase of the steps that are recorded
        self.folder = Path(config.train.output)
        self.trackers: list[Tracker] = []
        self.behind = False  # records that could not be written
        self.last_step = 0
        # Of all steps in the records, as a viewer reads only their end.
        self.totals: dict[str, float] = {"total_tokens": 0, "total_seconds": 0.0}

    def begin(self, runtime: Runtime, step: int) -> None:
        """Writes the config and opens the records; those after `step` move to files of their own.

        Collective, as a device's FLOP/s may be measured.
        """
        train = self.config.train
        peak = run_peak_flops(train.precision, train.matmul, runtime.device)
        self.flops_per_second = runtime.world * peak  # 0 where it is not known
        self.device, self.last_step = runtime.device, step
        if not self.writes:
            return
        with folder_of("train.output", self.folder):
            make_folder(self.folder / CHECKPOINTS)  # now: a run that cannot save is not begun
            write_text(self.folder / "config.toml", dump_toml(self.config))
            facts = {"world": runtime.world, "host": socket.gethostname()}
            facts |= runtime.attempt.record()
            write_text(self.folder / FACTS, json.dumps(facts) + "\n")
            self.metrics, last, rows = _reopened(self.folder / METRICS, step)
            self.events, _, _ = _reopened(self.folder / EVENTS, step)
        for total, key in zip(self.totals, ("tokens", "step_seconds"), strict=True):
            self.totals[total] = sum(row[key] for row in rows if is_number(row.get(key)))
        if last:
            aside = _aside(self.folder / METRICS)
            self.say(f"note: metrics of steps {step + 1:,} to {last:,} are kept in {aside}")
        if step:
            self.event("resumed", {"step": step, "world": runtime.world})
        self.trackers = open_trackers(self.config, step)

    def step(self, step: Step, facts: StepFacts) -> dict[str, Any]:
        """Records a step, and returns its row."""
        self.last_step = step.step
        self.totals["total_tokens"] += round(step.tokens)
        self.totals["total_seconds"] += step.seconds
        so_far = self.totals | {"memory_bytes": peak_memory(self.device)}
        row = _row(self.span.config, step, facts, self.flops_per_second, so_far)
        if self.config.phase:
            row["phase"] = self.span.number
        if not self.writes:
            return row
        self._append(self.metrics, finite(row))
        if step.step % self.config.train.log_every == 0 or facts.validation or facts.tasks:
            values = {k: v for k, v in row.items() if k not in ("step", "replica_steps")}
            values = _by_layer(values, step.routers, self.config.model.first_dense_layers)
            for tracker in self.trackers:
                tracker.log(values, step=step.step)
        return row

    def event(self, name: str, facts: dict[str, Any]) -> None:
        """Records what happens besides steps."""
        if self.writes:
            self._append(self.events, {"event": name} | facts)

    def saved(self, save: SaveRecord) -> None:
        """Records a checkpoint."""
        self.event("saved", save._asdict() | {"folder": str(save.folder)})

    def save_failed(self, step: int, reason: str, last_good: Path | None) -> None:
        """Records and warns of a checkpoint that was not written."""
        good = f"the last good one is {last_good}" if last_good else "there is none before it"
        facts = {"step": step, "reason": reason, "last_good": last_good and str(last_good)}
        self.event("save_failed", facts)
        self.say(f"warning: step {step}: {reason}; the run goes on, {good}")

    def failed(self, reason: str) -> None:
        """Records what ended the run before its last step."""
        self.event("failed", {"step": self.last_step, "reason": reason})

    def warn(self, text: str) -> None:
        """Says what went wrong, and did not end the run."""
        self.say(f"warning: {text}")

    def close(self) -> None:
        """Closes the files and the trackers."""
        if not self.writes:
            return
        for file in (self.metrics, self.events):
            with suppress(OSError):  # a full disk, which has been said
                file.close()
        while self.trackers:
            self.trackers.pop().finish()

    def _append(self, file: TextIOWrapper, row: dict[str, Any]) -> None:
        """Writes a line; on a full disk it waits in the file's buffer for the next, said once."""
        try:
            file.write(json.dumps(row) + "\n")
            file.flush()
        except OSError as error:
            if not self.behind:
                self.say(f"warning: {file.name}: {error.strerror}; the run goes on")
            self.behind = True


def peak_memory(device: torch.device) -> int:
    """The most bytes that this rank has held: of a GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _row(
    config: RunConfig, step: Step, facts: StepFacts, peak: float, so_far: dict[str, float]
) -> dict[str, Any]:
    """The record of a step; `peak` are the FLOP/s of all ranks' devices, and `so_far` the figures
    of the run up to the step."""
    flops_per_token = training_flops(
        config.model, config.batch.seq_len, config.lora, freeze=config.train.freeze
    )
    flops = flops_per_token * step.tokens
    row: dict[str, Any] = {
        "step": step.step,
        "consumed_samples": facts.consumed_samples,
        "tokens": round(step.tokens),
        "loss": step.loss,
        "lr": step.lr,
        "grad_norm": step.grad_norm,
        "loss_scale": step.loss_scale,
        "skipped": step.outcome != "updated",
        "step_seconds": step.seconds,
        "tokens_per_second": step.tokens / step.seconds,
        "mfu": flops / step.seconds / peak if peak else None,
        "sync_bytes": facts.sync_bytes,
        **so_far,
    }
    if step.replica_steps:
        row["replica_steps"] = step.replica_steps
    if facts.ranks is not None:
        row |= facts.ranks.row()
    if facts.replica_distance is not None:
        row["replica_distance"] = facts.replica_distance
    if facts.validation is not None:
        row |= facts.validation.row()
    row |= facts.tasks
    if step.expert_load is not None:
        row["expert_load_max_over_mean"] = step.expert_load
    return row | dict(step.routers)


def _by_layer(
    values: dict[str, Any], figures: Mapping[str, list[float]], first: int
) -> dict[str, Any]:
    """Splits a row's figures by layer into values of a name each, as trackers take numbers."""
    plain = {name: value for name, value in values.items() if name not in figures}
    split = {
        f"{name}/{layer}": number
        for name, numbers in figures.items()
        for layer, number in enumerate(numbers, first)
    }
    return plain | split


def _reopened(path: Path, step: int) -> tuple[TextIOWrapper, int, list[dict[str, Any]]]:
    """(a records file opened for appending, the last step that was moved out of it or 0, the
    records that stay).

    Records after `step` move to the file of `_aside`.
    """
    records = list(step_records(path)) if path.exists() else []
    later = [(line, record["step"]) for line, record in records if record["step"] > step]
    if later:
        with append_untrusted(_aside(path)) as superseded:
            superseded.write("".join(f"{line}\n" for line, _ in later).encode())
            superseded.flush()
            os.fsync(superseded.fileno())
    write_text(path, "".join(f"{line}\n" for line, record in records if record["step"] <= step))
    file = TextIOWrapper(append_untrusted(path), encoding="utf-8")
    staying = [record for _, record in records if record["step"] <= step]
    return file, max((of_step for _, of_step in later), default=0), staying


def _aside(path: Path) -> Path:
    """The file of records of steps that were run again."""
    return path.with_suffix(f".superseded{path.suffix}")
