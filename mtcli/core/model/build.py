"""Builds this rank's stages of a model, and loads their weights from a checkpoint of any layout."""

from collections.abc import Mapping

import torch

from mtcli.core.checkpoint.manifest import OPTIMIZER
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import parameters, stage_layers
from mtcli.core.model.transformer import Stage
from mtcli.core.parallel.factory import LayerFactory
from mtcli.core.parallel.fp8 import fp8_products, require_fp8
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.ownership import OwnedShard
from mtcli.core.parallel.pipeline import ActivationFormat
from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.kernels.gemm import DEFAULT_GEMMS, LinearGemms

HOLLOW = torch.device("meta")  # where stages are built that take memory once they are cut


DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # of all but the operands of linear layers
}


def build_stages(config: RunConfig, groups: Groups, sharded: bool = False) -> dict[int, Stage]:
    """This rank's stages, uninitialised, by stage number.

    A tied embedding that is first and last stage of one rank is one parameter. With `sharded`
    every data rank holds some rows of each parameter (zero = 3).
    """
    parallel, layout = config.parallel, groups.layout
    dtype, products = DTYPES[config.train.precision], _products(config, groups.device)
    build = LayerFactory(
        table=parameters(config.model),
        groups=groups,
        dtype=torch.promote_types(dtype, torch.float32) if sharded else dtype,
        device=HOLLOW if sharded else groups.device,
        sequence_parallel=parallel.sequence_parallel,
        cp_mode=parallel.cp_mode,
        dispatcher=parallel.dispatcher,
        weight_work=WeightPasses(products or DEFAULT_GEMMS)
        if parallel.schedule == "zero_bubble"
        else None,
        products=products,
        remakes_activations=parallel.recompute != "full",
    )
    layers = stage_layers(config.model, layout, parallel.stage_layers)
    stages = {
        index: Stage(
            config.model,
            build,
            index,
            layers[index],
            seed=config.seed,
            recompute=parallel.recompute,
        )
        for index in layout.stages(groups.pp_rank)
    }
    first, last = stages.get(0), stages.get(layout.num_stages - 1)
    if first and last and first is not last and config.model.tie_embeddings:
        last.embedding = first.embedding
    if sharded:
        from mtcli.core.sync.fsdp import shard  # half a second of torch's imports

        shard(stages, groups, dtype)
    return stages


def _products(config: RunConfig, device: torch.device) -> LinearGemms | None:
    """How linear layers multiply, where it is not torch's own way."""
    if config.train.precision != "fp8":
        return None
    require_fp8(device, config.train.fp8_scaling)
    return fp8_products(config.train.fp8_scaling)


def activation_format(config: RunConfig) -> ActivationFormat:
    """How this config's activations travel between stages."""
    dtype = DTYPES[config.train.precision]
    return ActivationFormat(dtype, config.model.hidden_size, not config.parallel.sequence_parallel)


@torch.no_grad()
def load_weights(
    held: Mapping[str, OwnedShard],
    checkpoint: Checkpoint,
    model: ModelConfig,
    groups: Groups,
    from_masters: bool = False,
) -> None:
    """Fills parameters with this rank's slices of a checkpoint, whatever layout wrote it.

    With `from_masters`, those of another dtype than the checkpoint's are taken from its float32
    master weights, where it has them, which lose nothing in a wider dtype.
    """
    checkpoint.require_model(model)
    table, stored = parameters(model), set(checkpoint.names())
    for name, here in held.items():
        here.tensor.zero_()  # rows that pad the vocabulary
        if checkpoint.begins_at_zero(table[name]):
            continue
        source, master = name, f"{OPTIMIZER}master/{name}"
        if from_masters and master in stored and checkpoint.dtype(name) != here.tensor.dtype:
            source = master
        for box, view in here.blocks(table[name], groups):
            view.copy_(checkpoint.read(source, box))
