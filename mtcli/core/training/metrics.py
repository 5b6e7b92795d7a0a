"""A run's own records: the numbers before it starts, progress, metrics and events, trackers.

Experiment trackers through accelerate's; one that is missing or offline never stops a run.
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import typer
from tqdm import tqdm

from mtcli.core.checkpoint.folder import CHECKPOINTS
from mtcli.core.config.fp8 import listed, narrow_layers, weight_sizes
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.sync import DECENTRALIZED
from mtcli.core.config.untrusted import append_untrusted
from mtcli.core.mesh.parameters import count_adapters, count_parameters, forward_flops
from mtcli.core.runtime.atomic_writes import folder_of, make_folder, write_text
from mtcli.core.runtime.json_text import finite
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.rank_times import RankTimes
from mtcli.core.training.run_folder import EVENTS, FACTS, METRICS, step_records


def open_trackers(config: RunConfig) -> list[Any]:
    """The trackers of train.trackers that start, each with log(values, step) and finish()."""
    found = []
    for name in config.train.trackers:
        try:
            found.append(_Quiet(name, _open(name, config)))
        except Exception as error:  # noqa: BLE001 - whatever a tracker does, the run goes on
            _warn(name, error)
    return found


class _Quiet:
    """A tracker whose failures are said once and end it, and never the run."""

    def __init__(self, name: str, tracker: Any) -> None:
        self.name, self.tracker = name, tracker

    def log(self, values: dict[str, Any], step: int) -> None:
        self._call("log", values, step=step)

    def finish(self) -> None:
        self._call("finish")

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - see open_trackers
            _warn(self.name, error)
            self.tracker = None


def _open(name: str, config: RunConfig) -> Any:
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    output = config.train.output
    if name == "tensorboard":
        tracker = TensorBoardTracker("events", output)
    else:
        tracker = WandBTracker(output.rstrip("/").rpartition("/")[2], dir=output)
    tracker.start()
    return tracker


def _warn(name: str, error: Exception) -> None:
    print(f"warning: {name} is off: {error}", file=sys.stderr)  # noqa: T201 - not data


class SaveRecord(NamedTuple):
    """A checkpoint that was written."""

    step: int
    folder: Path
    bytes: int  # of its tensors
    stall_seconds: float  # in which training stood still for it
    write_seconds: float  # until it was durable


class StepFacts(NamedTuple):
    """What is recorded of a step besides what it did."""

    consumed_samples: int
    valid_loss: float | None  # of the average of replicas, where it was asked for
    sync_bytes: int  # that all ranks sent each other for data parallelism
    replica_distance: float | None  # root mean square, from the average; None where all are equal
    ranks: RankTimes | None = None  # where they are told in this step


class RunRecords:
    """The files of records in a run folder, and its trackers; on other ranks than the first none.

    `say` is told of what could not be written.
    """

    def __init__(self, config: RunConfig, writes: bool, say: Callable[[str], None]) -> None:
        self.config, self.writes, self.say = config, writes, say
        self.folder = Path(config.train.output)
        self.trackers: list[Any] = []
        self.behind = False  # records that could not be written

    def begin(self, runtime: Runtime, step: int) -> None:
        """Writes the config, and opens the records without the steps that will be run again."""
        if not self.writes:
            return
        with folder_of("train.output", self.folder):
            make_folder(self.folder / CHECKPOINTS)  # now: a run that cannot save is not begun
            write_text(self.folder / "config.toml", dump_toml(self.config))
            facts = {"world": runtime.world} | runtime.attempt.record()
            write_text(self.folder / FACTS, json.dumps(facts) + "\n")
            self.metrics = _truncated(self.folder / METRICS, step)
            self.events = _truncated(self.folder / EVENTS, step)
        if step:
            self.event("resumed", {"step": step, "world": runtime.world})
        self.trackers = open_trackers(self.config)

    def step(self, step: Any, told: StepFacts, peak: float) -> dict[str, Any]:
        """Records a step, and returns its row; `peak` are the FLOP/s of all ranks' devices."""
        row = _row(self.config, step, told, peak)
        if not self.writes:
            return row
        self._append(self.metrics, finite(row))
        if step.step % self.config.train.log_every == 0:
            values = {k: v for k, v in row.items() if k not in ("step", "replica_steps")}
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

    def close(self) -> None:
        """Closes the files and the trackers."""
        if not self.writes:
            return
        for file in (self.metrics, self.events):
            with suppress(OSError):  # a full disk, which has been said
                file.close()
        for tracker in self.trackers:
            tracker.finish()

    def _append(self, file: Any, row: dict[str, Any]) -> None:
        """Writes a line; on a full disk it waits in the file's buffer for the next, said once."""
        try:
            file.write(json.dumps(row) + "\n")
            file.flush()
        except OSError as error:
            if not self.behind:
                self.say(f"warning: {file.name}: {error.strerror}; the run goes on")
            self.behind = True


class RunLog:
    """Rank 0's records and what it says; the same calls on other ranks say nothing."""

    def __init__(self, config: RunConfig, speaks: bool, step: int, peak_flops: float) -> None:
        self.config, self.speaks, self.first_step = config, speaks, step
        self.peak = peak_flops
        self.records = RunRecords(config, speaks, self._say)
        self.bar: Any = None
        self.last_saved: Path | None = None
        self.loss_scale = 1.0  # that was last shown

    def begin(
        self, runtime: Runtime, rank_bytes: int, resumed_from: str, data: Mapping[str, str]
    ) -> None:
        """Says what is about to be done, in numbers, and opens the files; `data` are lines on the
        data by name."""
        world = runtime.world
        self.flops_per_second = self.peak * world
        if not self.speaks:
            return
        config, tokens = self.config, self.config.batch.tokens_per_step
        self.records.begin(runtime, self.first_step)
        rows = {
            "model": _model(config),
            "layout": f"{world} ranks: {_axes(config, world)}",
            "step": f"{tokens:,} tokens, {_precision(config, world)}",
            "sync": _sync(config, world),
            "rank 0": f"{rank_bytes / 2**20:,.1f} MiB of weights, gradients and optimizer",
            "from": resumed_from,
            "output": config.train.output,
        }
        for name, text in (rows | dict(data)).items():
            typer.echo(f"{name:<7}{text}")
        self.bar = tqdm(
            total=config.train.steps, initial=self.first_step, unit="step", file=sys.stderr
        )

    def step(self, step: Any, told: StepFacts) -> None:
        """Records a step."""
        if not self.speaks:
            return
        row = self.records.step(step, told, self.flops_per_second)
        if step.outcome == "overflow":
            self._warn_of_overflow(step)
        if step.step % self.config.train.log_every == 0:
            self.bar.set_postfix_str(self._line(row), refresh=False)
        self.bar.update(step.step - self.bar.n)  # draws the line, so it comes last

    def _line(self, row: dict[str, Any]) -> str:
        """The progress line; the loss scale only where it has changed."""
        text = f"loss {row['loss']:.4f} lr {row['lr']:.2e} {row['tokens_per_second']:,.0f} tok/s"
        text += f" mfu {100 * row['mfu']:.1f}%"
        if row["loss_scale"] != self.loss_scale:
            self.loss_scale = row["loss_scale"]
            text += f" loss scale {self.loss_scale:,g}"
        return text + (f" valid {row['valid_loss']:.4f}" if "valid_loss" in row else "")

    def _warn_of_overflow(self, step: Any) -> None:
        message = f"step {step.step} skipped, gradients overflow at loss scale {step.loss_scale:,g}"
        self.warn(message)

    def saved(self, save: SaveRecord) -> None:
        """Records a checkpoint, and how long training stood still for it."""
        self.last_saved = save.folder
        self.records.saved(save)
        text = f"saved {save.folder}: {save.bytes:,} bytes, training stood still "
        self._say(f"{text}{save.stall_seconds:.3f} s, written in {save.write_seconds:.3f} s")

    def save_failed(self, step: int, reason: str, last_good: Path | None) -> None:
        """Records and warns of a checkpoint that was not written."""
        self.records.save_failed(step, reason, last_good)

    def warn(self, text: str) -> None:
        """Says what went wrong, and did not end the run."""
        self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        if self.speaks:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Closes the progress line, the files and the trackers."""
        if not self.speaks:
            return
        self.bar.close()
        self.records.close()

    def end(self) -> None:
        """Names what was written last."""
        if self.speaks:
            typer.echo(f"wrote {self.last_saved or self.config.train.output}")


def _row(config: RunConfig, step: Any, told: StepFacts, peak: float) -> dict[str, Any]:
    """The record of a step; `peak` are the FLOP/s of all ranks' devices."""
    batch = config.batch
    tokens = batch.tokens_per_step
    if step.replica_steps:  # a round
        tokens *= sum(step.replica_steps) // len(step.replica_steps)
    flops = 3.0 * forward_flops(config.model, batch.seq_len) * tokens
    row = {
        "step": step.step,
        "consumed_samples": told.consumed_samples,
        "loss": step.loss,
        "lr": step.lr,
        "grad_norm": step.grad_norm,
        "loss_scale": step.loss_scale,
        "skipped": step.outcome != "updated",
        "step_seconds": step.seconds,
        "tokens_per_second": tokens / step.seconds,
        "mfu": flops / step.seconds / peak,
        "sync_bytes": told.sync_bytes,
    }
    if step.replica_steps:
        row["replica_steps"] = step.replica_steps
    if told.ranks is not None:
        row |= told.ranks.row()
    if told.replica_distance is not None:
        row["replica_distance"] = told.replica_distance
    if told.valid_loss is not None:
        row["valid_loss"] = told.valid_loss
    if step.expert_load is not None:
        row["expert_load_max_over_mean"] = step.expert_load
    return row


def _model(config: RunConfig) -> str:
    """Words the model's size, and that of what is trained where it is not all."""
    words = f"{config.model.architecture}, {count_parameters(config.model):,} parameters"
    if not config.lora.rank:
        return words
    trained = count_adapters(config.model, config.lora)
    return f"{words}; {trained:,} of adapters, of rank {config.lora.rank}, are trained"


def _axes(config: RunConfig, world: int) -> str:
    """The axes' sizes; those that many runs leave at 1 only where they are not."""
    p = config.parallel
    sizes = {"tp": p.tp, "pp": p.pp, "dp": world // (p.tp * p.cp * p.pp)}
    rarer = {"cp": p.cp, "ep": p.ep, "etp": p.etp, "vpp": p.vpp, "zero": p.zero}
    sizes |= {axis: size for axis, size in rarer.items() if size != (axis != "zero")}
    grid = f" ({p.grid_rows} x {p.tp // p.grid_rows})" if p.grid_rows > 1 else ""
    return " ".join(f"{a}={size}{grid if a == 'tp' else ''}" for a, size in sizes.items())


def _sync(config: RunConfig, world: int) -> str:
    """The strategy of data parallelism, and of how many replicas where they may differ."""
    replicas = config.num_replicas(world)
    inside = world // (config.parallel.tp * config.parallel.cp * config.parallel.pp * replicas)
    each = f" of {inside} data ranks" if inside > 1 else ""
    if replicas == 1:
        return config.sync.method
    graph = f" ({config.sync.topology})" if config.sync.method in DECENTRALIZED else ""
    differ = config.sync.method != "onebit"
    averaged = "; what is evaluated and exported is their average" if differ else ""
    return f"{config.sync.method}{graph}, {replicas} replicas{each}{averaged}"


def _precision(config: RunConfig, world: int) -> str:
    """The precision; for fp8 with its scaling, and the layers whose sizes it does not take."""
    t = config.train
    if t.precision != "fp8":
        return t.precision
    sizes = weight_sizes(config.model, config.parallel.tp)
    wide = {k: v for k, v in sizes.items() if k not in narrow_layers(t.fp8_scaling, sizes)}
    return f"fp8 {t.fp8_scaling}" + (f"; in bf16 {listed(wide)}" if wide else "")


def _truncated(path: Path, step: int) -> Any:
    """A file of records opened for appending, without the steps that will be run again."""
    kept = []
    if path.exists() and step:
        kept = [line for line, record in step_records(path) if record["step"] <= step]
    write_text(path, "".join(line + "\n" for line in kept))
    return TextIOWrapper(append_untrusted(path), encoding="utf-8")
