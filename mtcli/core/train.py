"""`mtcli train`: the loop. Reads top to bottom as a run goes."""

import sys
from contextlib import closing
from operator import attrgetter
from pathlib import Path

import torch

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.opening import offering_earlier, open_checkpoint
from mtcli.core.diagnose import first_nonfinite
from mtcli.core.feed import open_feed
from mtcli.core.measure import peak_flops
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.report.runlog import RunLog
from mtcli.core.runtime import Runtime, StopSignal
from mtcli.core.sample_ledger import SampleLedger
from mtcli.core.saver import Saver
from mtcli.core.saving import progress, progress_of
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.errors import MtcliError, Problem, every, failed
from mtcli.core.starting import has_checkpoint
from mtcli.core.trainer import Step, Trainer

# Fields that a resumed run keeps, besides those of [model]: they decide weights, batches and what
# the optimizer's state means.
FIXED = ("seed", "batch.seq_len", "batch.global_batch_size", "optimizer.name")
FIXED += ("data.document_mask", "data.document_positions")


def train(config: RunConfig, runtime: Runtime, *, resume: bool, init: str | None) -> bool:
    """Trains to train.steps; returns False where a signal stopped it, after saving.

    `resume` goes on from the newest checkpoint of train.output, on this config's layout, whatever
    layout wrote it. `init` takes the weights of a checkpoint or Hugging Face folder at step 0.
    """
    stop = StopSignal()
    trainer = Trainer(config, runtime)
    feed, valid = every(
        lambda: open_feed(config, trainer.groups),
        lambda: config.train.eval_every and open_feed(config, trainer.groups, validation=True),
    )
    samples = SampleLedger(config, feed.batches)
    source, last_good = _start(trainer, samples, resume, init)
    log = RunLog(config, runtime.rank == 0, trainer.step, peak_flops(config, runtime))
    log.begin(runtime.world, trainer.state_bytes(), source)
    stopped = False
    with closing(log), closing(feed), Saver(trainer, log, last_good) as saver:
        while trainer.step < config.train.steps and not stopped:
            step = trainer.train_step(feed)
            if step.outcome == "fault":
                _skip(trainer, step, first_nonfinite(trainer, feed))
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


def _start(
    trainer: Trainer, samples: SampleLedger, resume: bool, init: str | None
) -> tuple[str, Path | None]:
    """Takes weights from the run's newest checkpoint, from another model's, or from the seed.

    Returns which it was in words, and this run's own checkpoint.
    """
    output, there = Path(trainer.config.train.output), has_checkpoint(trainer.config, resume)
    if there:
        checkpoint = open_checkpoint(output)
        with offering_earlier(checkpoint.folder):
            checkpoint.verify_hashes(trainer.groups.rank, trainer.layout.world)
        _require_same_run(trainer.config, checkpoint)
        consumed = checkpoint.step * trainer.config.batch.global_batch_size
        samples.resume(progress_of(checkpoint).samples, consumed)
        trainer.resume(checkpoint)
        return f"{checkpoint.folder}, step {checkpoint.step}", checkpoint.folder
    if init:
        checkpoint = open_checkpoint(Path(init))
        checkpoint.verify_weights(trainer.groups.rank, trainer.layout.world)
        trainer.load_weights(checkpoint)
        return f"{checkpoint.folder}, step {checkpoint.step}", None
    trainer.initialise()
    return "the seed", None


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
