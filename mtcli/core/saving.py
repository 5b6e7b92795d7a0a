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
    gradients, layout, rank = trainer.gradients, trainer.layout, trainer.groups.rank
    found = []
    for name, parameter in gradients.parameters.items():
        described = trainer.table[name]
        if described.is_primary(layout, rank) and not gradients.is_second_copy(name):
            box = described.rectangle(layout, rank)
            found.append(_piece(name, parameter.data, box, described))
    for key, tensor in trainer.optimizer.state().items():
        name = key.partition("/")[2]
        if gradients.answers_for(name):
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
        tensor[_inside(box)] = checkpoint.read(stored, box).to(tensor)
    trainer.optimizer.set_step(checkpoint.step)


def _share(trainer: "Trainer", name: str) -> Rectangle:
    """The rectangle of the rows that this rank's optimizer owns of a parameter."""
    box = trainer.table[name].rectangle(trainer.layout, trainer.groups.rank)
    rows = trainer.gradients.rows(name)
    first, last = min(rows.start, box.size[0]), min(rows.stop, box.size[0])  # padding is cut off
    return Rectangle((box.start[0] + first, *box.start[1:]), (last - first, *box.size[1:]))


def _piece(name: str, tensor: Tensor, box: Rectangle, described: Parameter) -> Piece:
    return Piece(name, tensor[_inside(box)].cpu(), box.start, described.shape)


def _inside(box: Rectangle) -> tuple[slice, ...]:
    """The part of a local tensor that is not padding."""
    return tuple(slice(n) for n in box.size)
