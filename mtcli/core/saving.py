"""A run's tensors as the pieces of a checkpoint, and back: every rank its own rectangles."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.store import Piece
from mtcli.core.optim.adamw import AdamW
from mtcli.core.parallel.dp import TIED
from mtcli.core.parallel.groups import Groups
from mtcli.core.spec.sharding import Parameter, Rectangle

if TYPE_CHECKING:
    from mtcli.core.trainer import Trainer

OPTIMIZER = "optimizer."  # before the kind and the parameter's name: optimizer.exp_avg/<name>


def pieces(trainer: "Trainer") -> list[Piece]:
    """The weights and the optimizer state that this rank answers for, without padding."""
    weights = {n: p.data for s in trainer.stages.values() for n, p in s.named_parameters()}
    state = {f"{OPTIMIZER}{key}": tensor for key, tensor in trainer.optimizer.state().items()}
    return [
        Piece(name, tensor[_inside(box)].cpu(), box.start, described.shape)
        for name, tensor, described, box in _owned(weights | state, trainer.table, trainer.groups)
    ]


@torch.no_grad()
def load_optimizer(
    optimizer: AdamW, checkpoint: Checkpoint, table: Mapping[str, Parameter], groups: Groups
) -> None:
    """Fills the optimizer state with this rank's slices of a checkpoint.

    A master that the checkpoint lacks, because it was trained in fp32, is the weight itself.
    """
    known = set(checkpoint.names())
    for key, tensor in optimizer.state().items():
        name = key.partition("/")[2]
        stored = f"{OPTIMIZER}{key}"
        if stored not in known and key.startswith("master/"):
            stored = name
        box = table[name].rectangle(groups.layout, groups.rank)
        tensor.zero_()
        tensor[_inside(box)] = checkpoint.read(stored, box).to(tensor)
    optimizer.set_step(checkpoint.step)


def _owned(
    tensors: Mapping[str, Tensor], table: Mapping[str, Parameter], groups: Groups
) -> Iterator[tuple[str, Tensor, Parameter, Rectangle]]:
    second_copy = TIED if groups.axes["ends"].rank > 0 else None
    for name, tensor in tensors.items():
        described = table[name.rpartition("/")[2]]
        if described.name != second_copy and described.is_primary(groups.layout, groups.rank):
            yield name, tensor, described, described.rectangle(groups.layout, groups.rank)


def _inside(box: Rectangle) -> tuple[slice, ...]:
    """The part of a local tensor that is not padding."""
    return tuple(slice(n) for n in box.size)
