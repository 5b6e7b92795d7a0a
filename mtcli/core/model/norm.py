"""Norm and dropout: what happens to the residual stream between the parallel regions."""

from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.parallel.factory import LayerFactory
from mtcli.kernels.dropout import dropout
from mtcli.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mtcli.kernels.random import stream_key


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the hidden dimension; statistics in float32."""

    def __init__(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.is_layer_norm = model.norm == "layernorm"
        self.eps = model.norm_eps

    def forward(self, x_TD: Tensor) -> Tensor:
        """x_TD normalised and scaled; same shape."""
        if self.is_layer_norm:
            return layer_norm(x_TD, self.weight, self.bias, self.eps)
        return rms_norm(x_TD, self.weight, self.eps)


class AddNorm(Norm):
    """A norm of a sum, which goes on as the residual stream."""

    def forward(self, x_TD: Tensor, y_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + y, the sum normalised and scaled); no y is nothing to add."""
        if y_TD is None:
            return x_TD, super().forward(x_TD)
        if self.is_layer_norm:
            return add_layer_norm(x_TD, y_TD, self.weight, self.bias, self.eps)
        return add_rms_norm(x_TD, y_TD, self.weight, self.eps)


class Dropout(nn.Module):
    """Dropout whose mask depends on (seed, site, token number, column), never on the layout."""

    def __init__(self, site: str, drop: float, seed: int) -> None:
        super().__init__()
        self.drop = drop
        self.key = stream_key(seed, "dropout", site)

    def forward(
        self, x_TD: Tensor, numbers_T: Tensor | None, onto_TD: Tensor | None = None
    ) -> Tensor:
        """x_TD with elements zeroed and the rest scaled up, added to `onto_TD` where given.

        Nothing is zeroed where numbers are None.
        """
        if self.drop > 0.0 and numbers_T is not None:
            return dropout(x_TD, numbers_T, self.key, self.drop, onto_TD)
        return x_TD if onto_TD is None else onto_TD + x_TD
