"""`mtcli train`: the loop. Reads top to bottom as a run goes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
import typer

from mtcli.core.checkpoint.folder import CHECKPOINTS
from mtcli.core.checkpoint.opening import (
    newest_step,
    offering_earlier,
    open_agreed,
    require_alike,
    together,
)
from mtcli.core.checkpoint.progress import planned_samples, progress_of
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.errors import MtcliError, Problem, collect_errors, failed
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.loader import require_data
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis, Groups, world_axis
from mtcli.core.runtime.launch import Runtime, StopSignal
from mtcli.core.training.consumed_samples import ConsumedSamples
from mtcli.core.training.loader import MicroBatchLoader, open_loader
from mtcli.core.training.metrics import RunLog
from mtcli.core.training.nonfinite import first_nonfinite
from mtcli.core.training.run_lock import held
from mtcli.core.training.save import Saver
from mtcli.core.training.state import progress, resume
from mtcli.core.training.step import Step, Trainer

# Fields that a resumed run keeps, besides those of [model]: they decide weights, batches and what
# the optimizer's state means.
FIXED = ("seed", "batch.seq_len", "batch.global_batch_size", "optimizer.name")
FIXED += ("data.document_mask", "data.document_positions")


class StartingPoint(NamedTuple):
    """Where a run starts: at its own newest checkpoint, another model's, or (None) the seed."""

    checkpoint: Checkpoint | None
    is_own: bool

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.checkpoint.step if self.checkpoint and self.is_own else 0

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "the seed"
        return f"{self.checkpoint.folder}, step {self.checkpoint.step}"


def train(
    config: RunConfig,
    runtime: Runtime,
    *,
    resume: bool,
    init: str | None,
    measure_peak: Callable[[], float],
) -> bool:
    """Trains to train.steps; returns False where a signal stopped it, after saving.

    `resume` goes on from the newest checkpoint of train.output, on this config's layout, whatever
    layout wrote it. `init` takes the weights of a checkpoint or Hugging Face folder at step 0.
    `measure_peak` tells a device's FLOP/s, which MFU is a fraction of; all ranks call it at once.
    """
    stop = StopSignal()
    world = world_axis(runtime.rank, runtime.world, runtime.recorder)
    with _held(config, resume, world):
        source = _source(config, init, world)
        if source.step >= config.train.steps:
            if world.rank == 0:
                done = f"step {source.step} of train.steps={config.train.steps} is done"
                typer.echo(f"nothing to do: {done}; set more train.steps to go on from {source}")
            return True
        return _train(config, runtime, source, stop, measure_peak)


@contextmanager
def _held(config: RunConfig, resumes: bool, world: Axis) -> Iterator[None]:
    """The run folder, held by rank 0. Raises MtcliError on every rank where that is refused."""
    with ExitStack() as stack:

        def take() -> str:
            if world.rank:
                return ""
            return stack.enter_context(held(Path(config.train.output), resumes))

        checked_later = partial(require_data, config)
        (notice,) = together(world, lambda: collect_errors(take, otherwise=checked_later))
        if notice:
            sys.stderr.write(f"note: {notice}\n")
        yield


def _source(config: RunConfig, init: str | None, world: Axis) -> StartingPoint:
    """The run's newest checkpoint, or another model's, as all ranks agree; or the seed."""
    output = Path(config.train.output)
    if newest_step(output / CHECKPOINTS, world):
        checkpoint = open_agreed(output, world)
        together(world, lambda: _verify(checkpoint, world))
        _require_same_run(config, checkpoint)
        return StartingPoint(checkpoint, is_own=True)
    if init:
        checkpoint = open_agreed(Path(init), world)
        together(world, lambda: checkpoint.verify_weights(world.rank, world.size))
        return StartingPoint(checkpoint, is_own=False)
    return StartingPoint(None, is_own=False)


def _verify(checkpoint: Checkpoint, world: Axis) -> None:
    with offering_earlier(checkpoint.folder):
        checkpoint.verify_hashes(world.rank, world.size)


def _train(
    config: RunConfig,
    runtime: Runtime,
    source: StartingPoint,
    stop: StopSignal,
    measure_peak: Callable[[], float],
) -> bool:
    trainer = Trainer(config, runtime)
    world = trainer.groups.world
    loader, valid = together(world, lambda: _open_loaders(config, trainer.groups, source))
    samples = ConsumedSamples(config, loader.batches)
    require_alike(world, samples.hashes, "reads data with the hashes", "data.train")
    last_good = _fill(trainer, samples, source)
    log = RunLog(config, runtime.rank == 0, trainer.step, measure_peak())
    log.begin(runtime.world, trainer.state_bytes(), str(source))
    stopped = False
    with closing(log), closing(loader), Saver(trainer, log, last_good) as saver:
        while trainer.step < config.train.steps and not stopped:
            step = trainer.train_step(loader)
            if step.outcome == "fault":
                _skip(trainer, step, first_nonfinite(trainer, loader))
            if step.outcome != "updated":
                samples.skip(step.step, step.outcome)
            valid_loss = None
            if valid and step.step % config.train.eval_every == 0:
                valid_loss = trainer.evaluate(valid)
            log.step(step, trainer.consumed_samples, valid_loss)
            stopped = _any_rank(trainer, stop.received > 0)
            saver.poll()
            if stopped or _saves_at(config, step.step):
                saver.save(progress(trainer, samples))
        saver.finish()
    log.end()
    return trainer.step >= config.train.steps


def _open_loaders(
    config: RunConfig, groups: Groups, source: StartingPoint
) -> tuple[MicroBatchLoader, MicroBatchLoader | None]:
    """The data to train on, and to validate on where that is asked for."""
    planned = None
    if source.checkpoint and source.is_own:
        planned = planned_samples(source.checkpoint)
    loader, valid = collect_errors(
        lambda: open_loader(config, groups, planned=planned),
        lambda: open_loader(config, groups, validation=True) if config.train.eval_every else None,
    )
    return loader, valid


def _fill(trainer: Trainer, samples: ConsumedSamples, source: StartingPoint) -> Path | None:
    """Fills the state of a run from where it starts; returns its own checkpoint, if that is one."""
    checkpoint = source.checkpoint
    if checkpoint is None:
        trainer.initialise()
    elif source.is_own:
        consumed = checkpoint.step * trainer.config.batch.global_batch_size
        samples.resume(progress_of(checkpoint).samples, consumed)
        resume(trainer, checkpoint)
        return checkpoint.folder
    else:
        trainer.load_weights(checkpoint)
    return None


def _skip(trainer: Trainer, step: Step, where: str) -> None:
    """Goes on to the next batch with the weights as they were, or stops the run (exit 1)."""
    scaled = f" at loss scale {step.loss_scale:,g}" if step.loss_scale != 1.0 else ""
    message = f"step {step.step}: loss {step.loss}, gradient norm {step.grad_norm}{scaled}"
    message += f"; first {where}"
    if trainer.config.train.on_nonfinite == "stop":
        hint = "the last checkpoint is kept; lower optimizer.lr, look at the samples, or "
        raise failed(message, hint + "set train.on_nonfinite = 'skip'")
    trainer.step = step.step
    if trainer.groups.rank == 0:
        sys.stderr.write(f"\nwarning: skipped {message}\n")


def _require_same_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """A resumed run may change its layout, precision and length, not its model, data or rule.

    The rate of the routers' biases may change, not whether there are any.
    """
    before = checkpoint.config
    if before is None:
        return
    fixed = {field: (attrgetter(field)(before), attrgetter(field)(config)) for field in FIXED}
    shapes = before.model.model_dump(), config.model.model_dump()
    fixed |= {f"model.{key}": (shapes[0][key], shapes[1][key]) for key in shapes[0]}
    if all(fixed["model.router_bias_update_rate"]):  # with biases, at any rate
        del fixed["model.router_bias_update_rate"]
    problems = [
        Problem(f"it is {new}, and the run was trained with {old}", f"set it back to {old}", field)
        for field, (old, new) in fixed.items()
        if old != new
    ]
    if problems:
        hint = "to change them, train from the run's weights: --init, and another train.output"
        raise MtcliError(*problems, hint=hint)


def _saves_at(config: RunConfig, step: int) -> bool:
    every = config.train.save_every
    return step == config.train.steps or (every > 0 and step % every == 0)


def _any_rank(trainer: Trainer, flag: bool) -> bool:
    """Whether the flag is set on any rank: all leave the loop after the same step."""
    sums = torch.tensor([float(flag)], device=trainer.groups.device)
    return all_reduce(sums, trainer.groups.world).item() > 0.0
