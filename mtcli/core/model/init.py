"""Fills a rank's shards with initial weights, from a seed or from a checkpoint of any layout.

Initial weights are a function of (seed, parameter name, global index) alone.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from mtcli.core.checkpoint.compatibility import begins_at_zero, missing_head, require_model
from mtcli.core.checkpoint.manifest import OPTIMIZER
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.sharding import BOX_BYTES, Box, Parameter, boxes_of_at_most
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.ownership import OwnedShard
from mtcli.kernels.random import BLOCK, normal, stream_key

CPU = torch.device("cpu")


@torch.no_grad()
def initialise(
    shards: Mapping[str, OwnedShard],
    model: ModelConfig,
    groups: Groups,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Fills a rank's shards with initial weights, rounded to `dtype`, BOX_BYTES at a time."""
    for shard in shards.values():
        shard.tensor.zero_()  # rows that pad the vocabulary stay zero
        for box, view in shard.blocks(groups):
            on = view.device if view.is_cuda else CPU
            for part in boxes_of_at_most(box.size, BOX_BYTES // 4):
                values = initial_values(shard.parameter, model, part.moved(box.start), seed, on)
                view[part.slices] = values.to(dtype)


@torch.no_grad()
def load_weights(
    shards: Mapping[str, OwnedShard],
    checkpoint: Checkpoint,
    model: ModelConfig,
    groups: Groups,
    from_masters: bool = False,
    new_head: int | None = None,
) -> None:
    """Fills a rank's shards from a checkpoint, written on any layout.

    Parameters of a head that the checkpoint lacks get initial values of the seed `new_head`, if
    given. With `from_masters`, shards of a wider dtype are read from the checkpoint's float32
    master weights, if it has them. Where replicas differ their average is read.
    """
    require_model(checkpoint, model, but_head=new_head is not None)
    if new_head is not None:
        fresh = missing_head(checkpoint, model)
        begun = {name: shard for name, shard in shards.items() if name in fresh}
        dtype = next(iter(shards.values())).tensor.dtype
        initialise(begun, model, groups, new_head, dtype)
        shards = {name: shard for name, shard in shards.items() if name not in fresh}
    checkpoint = checkpoint.averaged()
    for shard in shards.values():
        shard.tensor.zero_()  # rows that pad the vocabulary
        if not begins_at_zero(checkpoint, shard.parameter):
            load_shard(shard, groups, checkpoint, from_masters)


def load_shard(
    shard: OwnedShard, groups: Groups, checkpoint: Checkpoint, from_masters: bool
) -> None:
    """Fills the shard of one parameter; see `load_weights`."""
    name = shard.parameter.name
    master = f"{OPTIMIZER}master/{name}"
    has_master = from_masters and master in checkpoint.tensors
    source = master if has_master and checkpoint.dtype(name) != shard.tensor.dtype else name
    for box, view in shard.blocks(groups):
        view.copy_(checkpoint.read(source, box))


def initial_values(
    described: Parameter,
    model: ModelConfig,
    box: Box,
    seed: int,
    device: torch.device = CPU,
) -> Tensor:
    """A box of a parameter's initial values, float32, bitwise equal on one kind of device.

    Matrices are N(0, init_std), those ahead of a residual addition N(0, init_std / sqrt(2 *
    num_layers)) (arXiv:1909.08053, section 3.1 of the recipe), norms 1, biases 0 and attention
    sinks N(0, init_std). An adapter's A has the variance of peft's, 1 / (3 * inputs), and its B is
    0.
    """
    if described.init in ("ones", "zeros"):
        return torch.full(box.size, float(described.init == "ones"), device=device)
    scale = 1.0 / math.sqrt(2.0 * model.num_layers) if described.init == "residual" else 1.0
    std = model.init_std * scale
    if described.init == "adapter":
        std = 1.0 / math.sqrt(3.0 * described.shape[-1])
    key = stream_key(seed, "init", described.name)
    numbers = partial(normal, key, device=device)
    return _normal_box(numbers, described.shape, box, 0).mul_(std)


def _normal_box(
    numbers: Callable[[int, int], Tensor], shape: tuple[int, ...], box: Box, offset: int
) -> Tensor:
    """A box of the tensor whose element i (row-major, from `offset`) is normal number i."""
    (start, *starts), (size, *sizes) = box
    inner = math.prod(shape[1:])
    if (
        tuple(sizes) == shape[1:] or inner < BLOCK
    ):  # contiguous, or rows so short that generating all is cheaper
        rows = numbers(offset + start * inner, size * inner).view(size, *shape[1:])
        return rows[(slice(None), *Box(tuple(starts), tuple(sizes)).slices)]
    inner_box = Box(tuple(starts), tuple(sizes))
    parts = [
        _normal_box(numbers, shape[1:], inner_box, offset + i * inner)
        for i in range(start, start + size)
    ]
    return torch.stack(parts) if parts else numbers(0, 0).view(box.size)
