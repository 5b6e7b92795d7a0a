"""Keeps the weights of a model's linear layers and token tables as a CPU multiplies them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mtcli.core.config.schema import RunConfig, StoredDtype
from mtcli.core.model.moe import ExpertArray
from mtcli.core.model.transformer import Stage
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.factory import Dense
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.tensor import ColumnLinear, RowLinear
from mtcli.core.parallel.vocab_parallel import VocabEmbedding
from mtcli.kernels.stored_weight import float_weight, int8_weight


class _Use(NamedTuple):
    """A module with a weight, how the weight is used, and the axis that shards its channels."""

    module: Any
    is_multiplied: bool = True  # as one matrix
    looks_up: bool = False
    axis: Axis | None = None


def can_pack(config: RunConfig, device: torch.device) -> bool:
    """Whether weights in float32 may be packed for a CPU."""
    return (
        device.type == "cpu" and config.train.precision == "fp32" and config.parallel.grid_rows == 1
    )


def store_weights(stage: Stage, dtype: StoredDtype) -> None:
    """Replaces a stage's weights, one after another. Collective.

    Scales of int8 are those of whole channels, also where ranks share a channel, so that every
    layout has the same weights. Norms, biases, routers and tables of positions stay as they are.
    """
    for module, is_multiplied, looks_up, axis in _uses(stage):
        weight = module.weight
        if not isinstance(weight, nn.Parameter):  # a tied table, which another stage has too
            continue
        if dtype == "fp32" and not is_multiplied:
            continue
        del module.weight  # of Parameters: an attribute takes its place
        values = weight.detach()
        if dtype == "int8":
            largest = values.abs().amax(1)
            if axis is not None:
                all_reduce(largest, axis, dist.ReduceOp.MAX)
            module.weight = int8_weight(values, largest)
        else:
            values = values.bfloat16() if dtype == "bf16" else values
            module.weight = float_weight(values, is_multiplied, looks_up)


def _uses(stage: Stage) -> Iterator[_Use]:
    """Yields the modules of a stage that have a weight to replace."""
    for name, module in stage.named_modules():
        if isinstance(module, VocabEmbedding):
            is_table = name == "embedding"
            tied = stage.model.tie_embeddings
            yield _Use(module, is_multiplied=tied or not is_table, looks_up=is_table)
        elif isinstance(module, RowLinear):
            yield _Use(module, axis=module.tp)
        elif isinstance(module, ColumnLinear | Dense):
            yield _Use(module)
        elif isinstance(module, ExpertArray):
            yield _Use(module.get_submodule(module.up_name), is_multiplied=False)
            etp = module.build.groups.axes["etp"]
            yield _Use(module.down, is_multiplied=False, axis=etp)
