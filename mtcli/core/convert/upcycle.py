"""Views a dense checkpoint as a mixture of experts, computed when it is read.

Attention, norms and embeddings are the dense checkpoint's own tensors. A box of the experts is read
from boxes of the dense MLP, and the router is initialised like a new one
(convert/upcycle_recipe.py).
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mtcli.core.checkpoint.compatibility import require_model
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.convert.upcycle_recipe import UpcycleRecipe
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box, Parameter
from mtcli.core.model.init import initial_values


def upcycled(dense: Checkpoint, recipe: UpcycleRecipe) -> Checkpoint:
    """Builds the checkpoint of a new model at step 0: no optimizer state and no earlier progress.

    Replicas that differ are averaged. Raises MtcliError where the dense checkpoint lacks a tensor.
    """
    require_model(dense, dense.model)
    dense = dense.averaged()
    table = parameters(recipe.model)
    return replace(
        dense,
        model=recipe.model,
        config=dense.config and dense.config.model_copy(update={"model": recipe.model}),
        step=0,
        extra={},
        tensors={name: _stored(dense, recipe, described) for name, described in table.items()},
    )


def rounding(
    dense: Checkpoint, recipe: UpcycleRecipe, dtype: torch.dtype | None
) -> torch.dtype | None:
    """Returns the coarsest dtype that a weight is rounded to: `dtype`, or the weight's own where a
    granularity that is no power of 2 scales it. None where no weight is rounded."""
    causes = [] if dtype is None else [dtype]
    if recipe.granularity & (recipe.granularity - 1):
        causes.append(dense.dtype("blocks.0.mlp.down.weight"))
    return max(causes, key=lambda cause: torch.finfo(cause).eps, default=None)


def _stored(dense: Checkpoint, recipe: UpcycleRecipe, described: Parameter) -> StoredTensor:
    name, shape = described.name, described.shape
    if name in dense.tensors:
        return dense.tensors[name]
    if described.is_expert:
        source = name.replace(".experts.", ".")
        read = partial(_experts, dense, source, described, recipe.granularity)
        return StoredTensor(dense.dtype(source), shape, (), read)
    dtype = dense.dtype(name.replace(".router.", ".down."))
    return StoredTensor(dtype, shape, (), partial(_router, recipe, described, dtype))


def _experts(dense: Checkpoint, source: str, described: Parameter, slices: int, box: Box) -> Tensor:
    """Reads a box of experts [E, ..., ffn / slices, ...]: expert e is slice e % slices of
    `source`."""
    out = torch.empty(box.size, dtype=dense.dtype(source))
    inner = described.shard_axes.index("etp")
    scale = slices if source.endswith(".down.weight") else 1
    for index in range(slices):
        copies = out[(index - box.start[0]) % slices :: slices]
        if not len(copies):
            continue
        start = list(box.start)
        start[inner] += index * described.shape[inner]
        copies.copy_(dense.read(source, Box(tuple(start[1:]), box.size[1:])).mul_(scale))
    return out


def _router(recipe: UpcycleRecipe, described: Parameter, dtype: torch.dtype, box: Box) -> Tensor:
    """Reads a box of the router's weight [E, hidden]: row e is row e // granularity of a new
    router."""
    (start, column), (count, width) = box
    rows = torch.arange(start, start + count) // recipe.granularity
    first, groups = int(rows[0]), int(rows[-1] - rows[0]) + 1
    fresh = Box((first, column), (groups, width))
    values = initial_values(described, recipe.model, fresh, recipe.seed)
    return values[rows - first].to(dtype)
