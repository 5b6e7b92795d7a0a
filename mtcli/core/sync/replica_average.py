"""Swaps in the replicas' average weights for a while; measures the replicas' distance from it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.norm_sketch import sketch


@contextmanager
@torch.no_grad()
def averaged(exchange: ReplicaExchange) -> Iterator[None]:
    """Inside, every replica has the replicas' average weights."""
    if not exchange.weights_differ:
        yield
        return
    shards, axis = exchange.inside.shards, exchange.measured_axis
    local_weights = {name: shard.tensor.clone() for name, shard in shards.items()}
    for shard in shards.values():
        wide = shard.tensor.to(torch.promote_types(shard.tensor.dtype, torch.float32))
        shard.tensor.copy_(all_reduce(wide.clone(), axis) / axis.size)
    try:
        yield
    finally:
        for name, shard in shards.items():
            shard.tensor.copy_(local_weights[name])


@torch.no_grad()
def distance(exchange: ReplicaExchange) -> float | None:
    """The root mean square distance of replicas' weights from their average; None where they are
    equal.

    Accurate to about 1 %: it is computed from sketches of 8,191 numbers.
    """
    if not exchange.weights_differ:
        return None
    ownership, weights = exchange.inside.ownership, exchange.inside.weights()
    counted = [x for name, x in weights.items() if x.numel() and ownership.answers_for(name)]
    local = sketch(counted, ownership.groups.device)
    mean = all_reduce(local.clone(), exchange.measured_axis) / exchange.replicas.size
    squares = (local - mean).square().sum().view(1)
    total = all_reduce(squares, ownership.groups.world)
    mean_square = float(total / exchange.replicas.size)
    return float(mean_square**0.5)
