"""Norms of a rank's layers: of whole rows, of a residual sum, and of rows that tp ranks share.

T tokens, D columns; statistics are in float32 at least.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.parallel.collectives import all_gather, all_reduce
from mtcli.core.parallel.factory import LayerFactory
from mtcli.core.parallel.groups import Axis
from mtcli.kernels.norm import add_norm, gain, norm


class Norm(nn.Module):
    """LayerNorm or RMSNorm of the columns of its weight."""

    def __init__(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.eps, self.centred = model.norm_eps, model.norm == "layernorm"
        self.offset = model.norm_offset

    def forward(self, x_TD: Tensor) -> Tensor:
        """Returns x_TD normalised and scaled, in its shape."""
        return norm(x_TD, *self.vectors, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The kernel's keyword arguments."""
        return {"eps": self.eps, "centred": self.centred, "offset": self.offset}

    @property
    def vectors(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of every column, as vectors."""
        return self.weight.flatten(), None if self.bias is None else self.bias.flatten()


class AddNorm(Norm):
    """A residual sum and its norm."""

    def forward(  # type: ignore[override]  # one more result than a Norm's
        self, x_TD: Tensor, y_TD: Tensor | None = None, y_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + y + y_bias, the sum normalised and scaled); None is zero."""
        if y_TD is None:
            return x_TD, super().forward(x_TD)
        return add_norm(x_TD, y_TD, *self.vectors, y_bias=y_bias, **self.options)


class HeadNorms(nn.Module):
    """LayerNorm or RMSNorm of each head, by a row of its own of a weight [heads, D], without bias.

    tp ranks replicate the rows and use those of their heads; ranks that share a key head, the same
    one.
    """

    def __init__(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        super().__init__()
        self.weight, tp = build.parameter(f"{name}.weight"), build.groups.tp
        self.num_heads, self.width = build.table[f"{name}.weight"].shape
        first = tp.rank * self.num_heads // tp.size
        self.heads = slice(first, first + max(self.num_heads // tp.size, 1))
        self.eps, self.centred = model.norm_eps, model.norm == "layernorm"
        self.offset = model.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [b, s, ..., D], whose inner dims are this rank's heads, normalised."""
        rows = self.weight.view(-1, self.num_heads, self.width)[:, self.heads]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        of_row = F.layer_norm if self.centred else F.rms_norm
        # [models of an array, b of each, s, heads, D]
        normed = (
            of_row(wide, (self.width,), eps=self.eps).flatten(2, -2).unflatten(0, (len(rows), -1))
        )
        scaled: Tensor = normed * gain(rows, self.offset)[:, None, None]
        return scaled.view(x.shape).to(x.dtype)


class ShardedNorm(Norm):
    """LayerNorm or RMSNorm of x_TD [T, D/c] over D columns that axis tp shards."""

    def __init__(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        super().__init__(name, model, build)
        self.tp = build.groups.tp

    def forward(self, x_TD: Tensor) -> Tensor:
        """Returns x_TD normalised and scaled, in its shape."""
        options = (*self.options.values(), self.tp)
        return _RowNorm.apply(x_TD, *self.vectors, *options)  # type: ignore[no-untyped-call, no-any-return]  # torch


class _RowNorm(torch.autograd.Function):
    """A norm over columns that are sharded over an axis, with statistics in float32 at least.

    Ranks' means and squared deviations are merged (Chan et al., 1979), as E[x^2] - E[x]^2 would
    cancel. LayerNorm all-gathers 2 numbers per token, RMSNorm sums 1; backward sums 2 or 1.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no containers of tensors
        ctx: Any,
        x_TD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        offset: float,
        axis: Axis,
    ) -> Tensor:
        wide = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        columns = wide.shape[1] * axis.size
        if centred:
            variances, means = torch.var_mean(wide, 1, correction=0)
            merged = all_gather(torch.stack([means, variances])[None], axis)
            mean = merged[:, 0].mean(0)
            variance = merged[:, 1].mean(0) + (merged[:, 0] - mean).square().mean(0)
        else:
            mean = wide.new_zeros(len(wide))
            variance = all_reduce(wide.square().sum(1), axis) / columns
        ctx.scale, ctx.mean = (variance + eps).rsqrt()[:, None], mean[:, None]
        ctx.save_for_backward(x_TD, weight)
        ctx.centred, ctx.axis, ctx.has_bias = centred, axis, bias is not None
        ctx.offset = offset
        y = (wide - ctx.mean) * ctx.scale * gain(weight, offset)
        return cast(Tensor, y if bias is None else y + bias).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight = ctx.saved_tensors
        normed = (x_TD.to(ctx.mean.dtype) - ctx.mean) * ctx.scale
        wide = grad.to(normed.dtype)
        of_normed, columns = wide * gain(weight, ctx.offset), x_TD.shape[1] * ctx.axis.size
        sums = [(of_normed * normed).sum(1), *([of_normed.sum(1)] if ctx.centred else [])]
        means = all_reduce(torch.stack(sums), ctx.axis).div_(columns)[..., None]
        of_x = of_normed.addcmul_(normed, means[0], value=-1)
        of_x = (of_x.sub_(means[1]) if ctx.centred else of_x).mul_(ctx.scale)
        of_bias = wide.sum(0).to(weight.dtype) if ctx.has_bias else None
        of_weight = (wide * normed).sum(0).to(weight.dtype)
        return of_x.to(x_TD.dtype), of_weight, of_bias, None, None, None, None
