"""`mtcli train`: the loop. Reads top to bottom as a run goes."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from mtcli.core.checkpoint.progress import planned_samples
from mtcli.core.config.errors import MtcliError, collect_errors, failed, visible
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.loader import require_data
from mtcli.core.data.vocabulary import describe_vocabulary
from mtcli.core.parallel.groups import Axis, Groups, world_axis
from mtcli.core.parallel.together import together
from mtcli.core.runtime.attempts import Attempt
from mtcli.core.runtime.launch import Runtime, StopSignal
from mtcli.core.sync.replica_average import distance
from mtcli.core.training.consumed_samples import ConsumedSamples, data_hashes
from mtcli.core.training.loader import MicroBatchLoader, open_loader
from mtcli.core.training.metrics import StepFacts
from mtcli.core.training.nonfinite import first_nonfinite
from mtcli.core.training.rank_times import StepTimer, agreed
from mtcli.core.training.reselect import Reselect, adopt_current, is_due
from mtcli.core.training.rounds import Rounds
from mtcli.core.training.run_folder import how_it_goes_on, newest_saved
from mtcli.core.training.run_lock import PATIENCE, lock_folder
from mtcli.core.training.run_log import RunLog
from mtcli.core.training.save import Saver
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
from mtcli.core.training.step import Step, Trainer


def train(
    config: RunConfig,
    runtime: Runtime,
    *,
    resume: bool,
    anew: bool = False,
    reselect: Reselect | None = None,
) -> bool:
    """Trains to train.steps; returns False where a signal stopped it, after saving.

    `resume` goes on from the newest checkpoint of train.output, on this config's layout, whatever
    layout wrote it; `anew` lets a run begin again that has none. Another run takes the weights of
    train.init, where that is set, at step 0. `reselect` is for data.reselect_every.
    """
    stop = StopSignal()
    world = world_axis(runtime.rank, runtime.world, runtime.recorder)
    with _locked(config, (resume, anew), runtime.attempt, world):
        start = starting_point(config, world)
        config = with_tokenizer(config, start)
        if start.step >= config.train.steps:
            if world.rank == 0:
                done = f"step {start.step} of train.steps={config.train.steps} is done"
                sys.stdout.write(
                    visible(f"nothing to do: {done}; set more train.steps to go on from {start}\n")
                )
            return True
        return _train(config, runtime, start, stop, reselect)


@contextmanager
def _locked(
    config: RunConfig, begins: tuple[bool, bool], attempt: Attempt, world: Axis
) -> Iterator[None]:
    """The run folder, held by rank 0. Raises MtcliError on every rank where that is refused.

    `begins` is whether a run that is there may be resumed, and whether it may begin anew.
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
    reselect: Reselect | None,
) -> bool:
    trainer = Trainer(config, runtime)
    world = trainer.groups.world
    loader, valid = together(world, lambda: _open_loaders(config, trainer.groups, start))
    hashes = data_hashes(loader.batches, runtime.local_rank, world)
    samples = ConsumedSamples(config, loader.batches, hashes, loader.subset)
    last_good = restore(trainer, samples, start)
    base = base_record(trainer, start)
    start.close()
    adopt_current(loader, config, reselect, trainer.step)
    for note in starting_notes(config, start) if runtime.rank == 0 else ():
        sys.stderr.write(visible(f"{note}\n"))
    log = RunLog(config, runtime.rank == 0, trainer.step)
    saves = SaveSchedule(config.train)
    about = describe_vocabulary(config) | loader.batches.describe()
    log.begin(runtime, trainer.state_bytes(), str(start), about | {"saves": str(saves)})
    stopped, timer = False, StepTimer(runtime.recorder, world.rank, world.size)
    next_step = Rounds(trainer).train if trainer.is_asynchronous else trainer.train_step
    with closing(log), closing(loader), Saver(trainer, log, last_good) as saver:
        while trainer.step < config.train.steps and not stopped:
            timer.begin()
            step = next_step(loader)
            timer.end(step.seconds)
            if step.outcome == "fault":
                _skip(saver, step, first_nonfinite(trainer, loader))
            if step.outcome != "updated":
                samples.skip(step.step, step.outcome)
            if samples.faults_in_a_row(step.step) >= config.train.max_skips:
                saver.wait()
                raise _too_many_skips(config, step.step)
            valid_loss, apart = None, distance(trainer.exchange)
            if valid and step.step % config.train.eval_every == 0:
                valid_loss = trainer.evaluate(valid)
            told_now = step.step % config.train.log_every == 0
            times = timer.taken() if told_now else []
            due = saves.due_by_time(saver.stall_seconds)
            own = stop.received > 0, due, trainer.sync_traffic.taken(), times
            stopped, due, sync_bytes, ranks = agreed(trainer.groups, *own)
            told = StepFacts(trainer.consumed_samples, valid_loss, sync_bytes, apart, ranks)
            log.step(step, told)
            saver.poll()
            again = is_due(config, step.step)
            if stopped or again or due or saves.due_by_step(step.step):
                saver.save(progress(trainer, samples, base))
                saves.saved()
            if again and not stopped:
                saver.finish()
                adopt_current(loader, config, reselect, step.step)
        saver.finish()
    log.end()
    return trainer.step >= config.train.steps


def _open_loaders(
    config: RunConfig, groups: Groups, start: StartingPoint
) -> tuple[MicroBatchLoader, MicroBatchLoader | None]:
    """The data to train on, and to validate on where that is asked for."""
    planned = None
    if start.checkpoint and start.is_own:
        planned = planned_samples(start.checkpoint)
    loader, valid = collect_errors(
        lambda: open_loader(config, groups, planned=planned),
        lambda: open_loader(config, groups, validation=True) if config.train.eval_every else None,
    )
    return loader, valid


def _skip(saver: Saver, step: Step, where: str) -> None:
    """Goes on to the next batch with the weights as they were, or stops the run (exit 1)."""
    scaled = f" at loss scale {step.loss_scale:,g}" if step.loss_scale != 1.0 else ""
    message = f"step {step.step}: loss {step.loss}, gradient norm {step.grad_norm}{scaled}"
    message += f"; first {where}"
    trainer = saver.trainer
    if trainer.config.train.on_nonfinite == "stop":
        saver.wait()
        hint = "lower optimizer.lr, look at the samples, or set train.on_nonfinite = 'skip'"
        raise failed(message, f"{newest_saved(Path(trainer.config.train.output))}; {hint}")
    trainer.step = step.step
    if trainer.groups.rank == 0:
        sys.stderr.write(f"\nwarning: skipped {message}\n")


def _too_many_skips(config: RunConfig, step: int) -> MtcliError:
    message = f"step {step}: {config.train.max_skips:,} batches in a row were skipped, as many as "
    hint = f"{how_it_goes_on(Path(config.train.output))}, and a lower optimizer.lr or other data"
    return failed(f"{message}train.max_skips allows", hint)
