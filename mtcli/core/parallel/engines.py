"""Chooses the engine that builds a model's layers: one- or two-dimensional tensor parallelism."""

import torch

from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.parallel.factory import LayerFactory
from mtcli.core.parallel.fp8 import fp8_gemms, require_fp8
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.lora import AdapterSettings
from mtcli.core.parallel.tensor import TensorParallelLayers
from mtcli.core.parallel.tensor_2d import GridLayers
from mtcli.core.parallel.zero_bubble import WeightPasses


def layer_factory(
    config: RunConfig, groups: Groups, dtype: torch.dtype, device: torch.device
) -> LayerFactory:
    """The layer factory of a run, for parameters of `dtype` on `device`.

    Raises MtcliError where the run trains in fp8 and the device has no float8 GEMMs.
    """
    parallel, gemms = config.parallel, None
    if config.train.precision == "fp8":
        require_fp8(groups.device, config.train.fp8_scaling)
        gemms = fp8_gemms(config.train.fp8_scaling)
    splits = parallel.schedule == "zero_bubble"
    on_grid = parallel.grid_rows > 1
    engine = GridLayers if on_grid else TensorParallelLayers
    return engine(
        table=run_parameters(config.model, config.lora, config.train.freeze),
        groups=groups,
        dtype=dtype,
        sequence_parallel=parallel.sequence_parallel or on_grid,
        cp_mode=parallel.cp_mode,
        dispatcher=parallel.dispatcher,
        weight_passes=WeightPasses() if splits else None,
        gemms=gemms,
        recompute_activations=parallel.recompute != "full",
        device=device,
        adapters=adapter_settings(config),
        tp_overlap=parallel.tp_overlap,
        frees_weights=parallel.zero == 3,
    )


def adapter_settings(config: RunConfig) -> AdapterSettings | None:
    """The settings of a run's LoRA adapters; None where it trains none."""
    lora = config.lora
    if not lora.rank:
        return None
    return AdapterSettings(config.model, lora.alpha / lora.rank, lora.dropout, config.seed)
