"""A run's tensors as the pieces of a checkpoint, and back: every rank its own rectangles."""

from typing import TYPE_CHECKING

import torch

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.store import Piece
from mtcli.core.parallel.ownership import Held

if TYPE_CHECKING:
    from mtcli.core.trainer import Trainer

OPTIMIZER = "optimizer."  # before the kind and the parameter's name: optimizer.exp_avg/<name>


def pieces(trainer: "Trainer") -> list[Piece]:
    """The weights and the optimizer state that this rank answers for, without padding."""
    found = []
    for name, held in trainer.gradients.held.items():
        if trainer.saves(name):
            kept = held.tensor.to(trainer.dtype) if trainer.table[name].trained else held.tensor
            found += _pieces(trainer, name, name, Held(kept, held.rows))
    for key, tensor in trainer.optimizer.state().items():
        name = key.partition("/")[2]
        if trainer.ownership.answers_for(name):
            share = Held(tensor, trainer.ownership.rows(name))
            found += _pieces(trainer, f"{OPTIMIZER}{key}", name, share)
    return found


@torch.no_grad()
def load_optimizer(trainer: "Trainer", checkpoint: Checkpoint) -> None:
    """Fills the optimizer state with this rank's shares of a checkpoint's.

    A master that the checkpoint lacks, because it was trained in fp32, is the weight itself.
    """
    known = set(checkpoint.names())
    for key, tensor in trainer.optimizer.state().items():
        name = key.partition("/")[2]
        stored = f"{OPTIMIZER}{key}"
        if stored not in known and key.startswith("master/"):
            stored = name
        tensor.zero_()
        share = Held(tensor, trainer.ownership.rows(name))
        for box, view in share.blocks(trainer.table[name], trainer.groups):
            view.copy_(checkpoint.read(stored, box))
    trainer.optimizer.set_step(checkpoint.step)


def _pieces(trainer: "Trainer", stored: str, name: str, held: Held) -> list[Piece]:
    """What a rank holds of a parameter or of its state, under the name it is `stored` by."""
    described = trainer.table[name]
    return [
        Piece(stored, view.cpu(), box.start, described.shape)
        for box, view in held.blocks(described, trainer.groups)
    ]
