"""Builds the strategy and the exchange of replicas that a config names."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from mtcli.core.config.schema import RunConfig
from mtcli.core.config.sync import DECENTRALIZED, PERIODIC, Method
from mtcli.core.exchange.facts import ReplicaShare
from mtcli.core.exchange.methods import METHODS
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.mesh.sharding import shards_parameters
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.factory import LayerFactory
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.ownership import Ownership
from mtcli.core.sync.all_reduce import BucketedDataParallel
from mtcli.core.sync.decentralized import Decentralized
from mtcli.core.sync.diloco import OuterExchange
from mtcli.core.sync.easgd import ElasticPulls
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.lsgd import LeaderPulls
from mtcli.core.sync.onebit import OneBit
from mtcli.core.sync.strategy import Strategy
from mtcli.kernels.gemm import DTYPES

EXCHANGES: dict[Method, type[ReplicaExchange]] = {
    "all_reduce": ReplicaExchange,
    "onebit": OneBit,
    "lsgd": LeaderPulls,
    "easgd": ElasticPulls,
    **dict.fromkeys(PERIODIC, OuterExchange),
    **dict.fromkeys(DECENTRALIZED, Decentralized),
}


def allocates_shards(config: RunConfig, layout: ParallelLayout) -> bool:
    """Whether the strategy takes stages on the meta device and allocates this rank's shards."""
    return shards_parameters(config.parallel.zero, layout, config.model)


def strategy_for(
    config: RunConfig, stages: Mapping[int, nn.Module], groups: Groups, dtype: torch.dtype
) -> Strategy:
    """Builds the strategy of a run over this rank's stages, which compute in `dtype`."""
    parallel, least = config.parallel, DTYPES[config.train.gradients]
    table = run_parameters(config.model, config.lora, config.train.freeze)
    ownership = Ownership(groups, table, parallel.sequence_parallel, parallel.zero > 0)
    if not allocates_shards(config, groups.layout):
        build = cast(LayerFactory, next(iter(stages.values())).build)  # one of all stages
        # Graphs read weights without a module's hooks, and other replicas change weights later.
        waits_in_forward = config.sync.method == "all_reduce" and not config.train.cuda_graphs
        return BucketedDataParallel(
            stages,
            ownership,
            parallel.bucket_mib * 2**20,
            build.gradient_sinks,
            least,
            gathers_ahead=waits_in_forward and groups.device.type != "cpu",
        )
    from mtcli.core.sync.fsdp import FullyShardedDataParallel  # half a second of torch's imports

    return FullyShardedDataParallel(stages, ownership, dtype, least)


def replica_exchange(config: RunConfig, inside: Strategy, optimizer: Optimizer) -> ReplicaExchange:
    """Builds what replicas exchange, over the strategy inside each."""
    share = ReplicaShare(
        sync=config.sync,
        steps=config.train.steps,
        replicas=inside.ownership.groups.replicas.size,
        sizes={name: master.numel() for name, master in optimizer.masters.items()},
        weight=optimizer.dtype.itemsize,
        optimizer=config.optimizer,
        overlaps=config.overlaps_neighbours,
    )
    method = config.sync.method
    return EXCHANGES[method](inside, optimizer, METHODS[method](share))
