"""Views checkpoints as averages of weights: the one that a run keeps, or the mean of several."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mtcli.core.checkpoint.manifest import OPTIMIZER, is_optimizer
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.mesh.sharding import Box

EMA = f"{OPTIMIZER}ema/"


def with_ema(checkpoint: Checkpoint) -> Checkpoint:
    """Views a checkpoint as the moving average of its weights, without optimizer state; weights
    that are not trained are as they are. Raises MtcliError where it holds no average."""
    if not any(name.startswith(EMA) for name in checkpoint.names()):
        message = f"{checkpoint.folder} holds no moving average of weights"
        raise wrong(message, "train with train.ema = 0.999, or --average K", "--average")
    return replace(
        checkpoint,
        tensors={
            name: checkpoint.tensors.get(f"{EMA}{name}", stored)
            for name, stored in checkpoint.tensors.items()
            if not is_optimizer(name)
        },
    )


def mean_of(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """Views checkpoints of a run as the mean of their weights, without optimizer state; the last
    one says the rest. A box is averaged in float64 when it is read. Raises MtcliError where they
    hold other tensors than the last one does."""
    *_, last = checkpoints
    shapes = {name: last.shape(name) for name in last.names() if not is_optimizer(name)}
    problems = [
        Problem(f"{one.folder} has no {name} {list(shape)} as {last.folder} has", "", "--average")
        for one in checkpoints
        for name, shape in shapes.items()
        if name not in one.tensors or one.shape(name) != shape
    ]
    if problems:
        raise MtcliError(*problems[:8], hint="average checkpoints of one model")
    views = tuple(one.averaged() for one in checkpoints)
    tensors = {
        name: StoredTensor(last.dtype(name), shape, (), partial(_mean, views, name))
        for name, shape in shapes.items()
    }
    return replace(last, tensors=tensors, replicas=1)


def _mean(checkpoints: Sequence[Checkpoint], name: str, box: Box) -> Tensor:
    """The mean of a box of a tensor over checkpoints, rounded once to the last one's dtype."""
    total = torch.zeros(box.size, dtype=torch.float64)
    for checkpoint in checkpoints:
        total += checkpoint.read(name, box)
    return (total / len(checkpoints)).to(checkpoints[-1].dtype(name))
