"""A run's tensors as the pieces of a checkpoint, and back: every rank its own rectangles."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.store import Piece
from mtcli.core.spec.sharding import Parameter, Rectangle

if TYPE_CHECKING:
    from mtcli.core.trainer import Trainer

OPTIMIZER = "optimizer."  # before the kind and the parameter's name: optimizer.exp_avg/<name>


def pieces(trainer: "Trainer") -> list[Piece]:
    """The weights and the optimizer state that this rank answers for, without padding."""
    found = []
    for name, (tensor, rows) in trainer.gradients.held.items():
        if trainer.saves(name):
            box, described = _box(trainer, name).rows(rows), trainer.table[name]
            kept = tensor.to(trainer.dtype) if described.trained else tensor
            found.append(_piece(name, kept, box, described))
    for key, tensor in trainer.optimizer.state().items():
        name = key.partition("/")[2]
        if trainer.ownership.answers_for(name):
            box = _share(trainer, name)
            found.append(_piece(f"{OPTIMIZER}{key}", tensor, box, trainer.table[name]))
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
        box = _share(trainer, name)
        tensor.zero_()
        tensor[box.inside] = checkpoint.read(stored, box).to(tensor)
    trainer.optimizer.set_step(checkpoint.step)


def _share(trainer: "Trainer", name: str) -> Rectangle:
    """The rectangle of the rows that this rank's optimizer owns of a parameter."""
    return _box(trainer, name).rows(trainer.ownership.rows(name))


def _box(trainer: "Trainer", name: str) -> Rectangle:
    return trainer.table[name].rectangle(trainer.layout, trainer.groups.rank)


def _piece(name: str, tensor: Tensor, box: Rectangle, described: Parameter) -> Piece:
    return Piece(name, tensor[box.inside].cpu(), box.start, described.shape)
