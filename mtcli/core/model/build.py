"""Builds this rank's stages of a model."""

import torch

from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import stage_layers
from mtcli.core.model.transformer import Stage
from mtcli.core.parallel.engines import layer_factory
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.pipeline import ActivationFormat
from mtcli.kernels.gemm import DTYPES

META = torch.device("meta")  # where stages are built whose shards are allocated later


def build_stages(config: RunConfig, groups: Groups, on_meta: bool = False) -> dict[int, Stage]:
    """This rank's stages, uninitialised, by stage number.

    Where a rank has the first and the last stage, a tied embedding is one parameter. Stages
    `on_meta` have no memory and are float32 at least, for a strategy that allocates shards (zero =
    3).
    """
    dtype, layout = DTYPES[config.train.precision], groups.layout
    wide = torch.promote_types(dtype, torch.float32) if on_meta else dtype
    build = layer_factory(config, groups, wide, META if on_meta else groups.device)
    layers = stage_layers(config.model, layout, config.parallel.stage_layers)
    seed, recompute = config.seed, config.parallel.recompute
    stages = {
        index: Stage(config.model, build, index, layers[index], seed=seed, recompute=recompute)
        for index in layout.stages(groups.pp_rank)
    }
    first, last = stages.get(0), stages.get(layout.num_stages - 1)
    if first and last and first is not last and config.model.tie_embeddings:
        last.embedding = first.embedding
    return stages


def activation_format(config: RunConfig) -> ActivationFormat:
    """The format of this config's activations in p2p."""
    dtype, hidden = DTYPES[config.train.precision], config.model.hidden_size
    parallel = config.parallel
    if parallel.grid_rows > 1:
        return ActivationFormat(dtype, hidden * parallel.grid_rows // parallel.tp, 1, False)
    shards = parallel.tp if parallel.sequence_parallel else 1
    return ActivationFormat(dtype, hidden, shards, not parallel.sequence_parallel)
