"""Norm and dropout: what happens to the residual stream between the parallel regions."""

import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.parallel.build import Build
from mtcli.core.spec.model_config import ModelConfig
from mtcli.kernels.random import keep_mask, stream_key


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the hidden dimension; statistics in float32."""

    def __init__(self, name: str, model: ModelConfig, build: Build) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.is_layer_norm = model.norm == "layernorm"
        self.eps = model.norm_eps

    def forward(self, x_TD: Tensor) -> Tensor:
        """x_TD normalised and scaled; same shape."""
        size = x_TD.shape[-1:]
        if self.is_layer_norm:
            return F.layer_norm(x_TD, size, self.weight, self.bias, self.eps)
        return F.rms_norm(x_TD, size, self.weight, self.eps)


class Dropout(nn.Module):
    """Dropout whose mask depends on (seed, site, token number, column), never on the layout."""

    def __init__(self, site: str, drop: float, seed: int) -> None:
        super().__init__()
        self.drop = drop
        self.key = stream_key(seed, "dropout", site)

    def forward(self, x_TD: Tensor, numbers_T: Tensor | None) -> Tensor:
        """x_TD with elements zeroed and the rest scaled up; unchanged where numbers are None."""
        if self.drop == 0.0 or numbers_T is None:
            return x_TD
        columns = x_TD.shape[-1]
        index = numbers_T[:, None] * columns + numbers_T.new_tensor(range(columns))
        return x_TD * keep_mask(self.key, index, self.drop).to(x_TD.dtype).div_(1.0 - self.drop)
