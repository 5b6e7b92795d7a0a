"""A run's tensors as the pieces of a checkpoint, and back: every rank its own rectangles."""

import torch

from mtcli.core.checkpoint.manifest import OPTIMIZER
from mtcli.core.checkpoint.progress import RandomState, RunProgress, progress_of
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.store import Shard
from mtcli.core.model.build import load_weights
from mtcli.core.parallel.ownership import OwnedShard
from mtcli.core.training.consumed_samples import ConsumedSamples
from mtcli.core.training.step import Trainer


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
    for name, held in trainer.gradients.held.items():
        if trainer.saves(name):
            kept = held.tensor.to(trainer.dtype) if trainer.table[name].trained else held.tensor
            found += _pieces(trainer, name, name, OwnedShard(kept, held.rows))
    for key, tensor in trainer.optimizer.state().items():
        name = key.partition("/")[2]
        if trainer.ownership.answers_for(name):
            share = OwnedShard(tensor, trainer.ownership.rows(name))
            found += _pieces(trainer, f"{OPTIMIZER}{key}", name, share)
    return found


def resume(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Restores weights, optimizer and step of a run's checkpoint, whatever layout wrote it and in
    whatever precision: its float32 master weights are lost in none.

    Raises MtcliError where the manifest's counters make no sense.
    """
    model, held = trainer.config.model, trainer.gradients.held
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
        share = OwnedShard(tensor, trainer.ownership.rows(name))
        for box, view in share.blocks(trainer.table[name], trainer.groups):
            view.copy_(checkpoint.read(stored, box))
    trainer.optimizer.updates = checkpoint.step if done.updates is None else done.updates
    trainer.loss_scale.load(done.loss_scale)


def _pieces(trainer: Trainer, stored: str, name: str, held: OwnedShard) -> list[Shard]:
    """What a rank holds of a parameter or of its state, under the name it is `stored` by."""
    described = trainer.table[name]
    return [
        Shard(stored, view, box.start, described.shape)
        for box, view in held.blocks(described, trainer.groups)
    ]
