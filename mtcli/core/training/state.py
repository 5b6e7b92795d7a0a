"""A run's tensors as the pieces of a checkpoint, and back: every rank its own rectangles."""

from typing import Literal

import torch
from pydantic import ConfigDict, ValidationError

from mtcli.core.checkpoint.names import OPTIMIZER
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.safetensors_file import damaged
from mtcli.core.checkpoint.store import Shard
from mtcli.core.config.fields import Count, Section
from mtcli.core.model.build import load_weights
from mtcli.core.optim.loss_scale import ScaleState
from mtcli.core.parallel.ownership import OwnedShard
from mtcli.core.training.consumed_samples import ConsumedSamples, SampleRecord
from mtcli.core.training.step import Trainer


class RandomState(Section):
    """The whole state of the random numbers: each is a function of the seed, a name, the step and a
    global index (keyed counters), so no generator has a state of its own.
    """

    kind: Literal["counter"] = "counter"
    seed: Count
    step: Count


class RunProgress(Section):
    """What a run's checkpoint keeps besides its tensors: the manifest's `extra`."""

    model_config = ConfigDict(extra="ignore")  # notes of others, which no step depends on

    consumed_samples: Count = 0
    """sequences trained on"""
    updates: Count | None = None
    """updates made; fewer than steps where some were skipped"""
    loss_scale: ScaleState | None = None
    """of a float16 run whose scale is dynamic"""
    random: RandomState | None = None
    """of initial weights, dropout and the order of the data"""
    samples: SampleRecord | None = None
    """the sample ledger"""


def progress(trainer: Trainer, samples: ConsumedSamples | None = None) -> RunProgress:
    """How far a run has come, and with which data where there is a ledger of it."""
    return RunProgress(
        consumed_samples=trainer.consumed_samples,
        updates=trainer.optimizer.updates,
        loss_scale=trainer.loss_scale.state(),
        random=RandomState(seed=trainer.config.seed, step=trainer.step),
        samples=samples and samples.record(trainer.consumed_samples),
    )


def shards(trainer: Trainer) -> list[Shard]:
    """The weights and the optimizer state that this rank answers for, on its device, unpadded."""
    found = []
    for name, (tensor, rows) in trainer.strategy.shards.items():
        if trainer.strategy.saves(name):
            kept = tensor.to(trainer.dtype) if trainer.table[name].trained else tensor
            found += _pieces(trainer, name, name, OwnedShard(kept, rows))
    for key, tensor in trainer.optimizer.state().items():
        name = key.partition("/")[2]
        if trainer.strategy.ownership.answers_for(name):
            share = OwnedShard(tensor, trainer.strategy.ownership.rows(name))
            found += _pieces(trainer, f"{OPTIMIZER}{key}", name, share)
    return found


def resume(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Restores weights, optimizer and step of a run's checkpoint, whatever layout wrote it and in
    whatever precision: its float32 master weights are lost in none.

    Raises MtcliError where the manifest's counters make no sense.
    """
    model, held = trainer.config.model, trainer.strategy.shards
    load_weights(held, checkpoint, model, trainer.groups, from_masters=True)
    _load_optimizer(trainer, checkpoint)
    trainer.step = checkpoint.step


@torch.no_grad()
def _load_optimizer(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Fills the optimizer state with this rank's shares of a checkpoint's, and its counters.

    A master that the checkpoint lacks, because it was trained in fp32, is the weight itself.
    Raises MtcliError where the manifest's counters make no sense.
    """
    done = progress_of(checkpoint)
    known = set(checkpoint.names())
    for key, tensor in trainer.optimizer.state().items():
        name = key.partition("/")[2]
        stored = f"{OPTIMIZER}{key}"
        if stored not in known and key.startswith("master/"):
            stored = name
        tensor.zero_()
        share = OwnedShard(tensor, trainer.strategy.ownership.rows(name))
        for box, view in share.blocks(trainer.table[name], trainer.groups):
            view.copy_(checkpoint.read(stored, box))
    trainer.optimizer.updates = checkpoint.step if done.updates is None else done.updates
    trainer.loss_scale.load(done.loss_scale)


def progress_of(checkpoint: Checkpoint) -> RunProgress:
    """What a checkpoint says of its run's progress; raises MtcliError where it makes no sense."""
    try:
        return RunProgress.model_validate(checkpoint.extra)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged(checkpoint.folder, f"extra.{where}: {first['msg']}") from None


def planned_samples(checkpoint: Checkpoint) -> int | None:
    """How many samples a checkpoint's run was to have when it began, as far as that is known.

    Where its ledger does not say, it was written while each resume planned anew.
    """
    record, config = progress_of(checkpoint).samples, checkpoint.config
    if record is not None and record.planned is not None:
        return record.planned
    return config and config.train.steps * config.batch.global_batch_size


def _pieces(trainer: Trainer, stored: str, name: str, held: OwnedShard) -> list[Shard]:
    """What a rank holds of a parameter or of its state, under the name it is `stored` by."""
    described = trainer.table[name]
    return [
        Shard(stored, view, box.start, described.shape)
        for box, view in held.blocks(described, trainer.groups)
    ]
