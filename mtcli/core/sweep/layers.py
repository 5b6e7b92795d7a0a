"""Builds the layers of an array of B models of one shape (HFTA, arXiv:2102.02344, section 3).

T tokens of each model's micro-batch; activations x are [B * T, D], one model's tokens after
another's, so that layers without parameters are those of one model: residuals, activations,
attention. Parameters are [B, ...].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.parallel.factory import LayerFactory, TokenLoss
from mtcli.core.parallel.lora import AdapterSides, AdapterSite, output_blocks
from mtcli.core.parallel.norms import Norm
from mtcli.core.parallel.vocab_parallel import VocabCrossEntropy, VocabShard
from mtcli.kernels.activation import Activation
from mtcli.kernels.dropout import DropoutStream, dropout, dropout_stream
from mtcli.kernels.gemm import linear, matmul, runs_in_float32
from mtcli.kernels.grouped_gemm import grouped_linear
from mtcli.kernels.norm import add_norm, gain, norm
from mtcli.kernels.softcap import softcap


@dataclass(frozen=True, kw_only=True)
class ArrayLayers(LayerFactory):
    """The layers of an array; `memory` has its parameters [B, ...] by name, and [1, ...] of weights
    that all models share, which are frozen."""

    memory: Mapping[str, Tensor]
    configs: tuple[RunConfig, ...]  # of the models

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of all models [B, ...], a view of their memory."""
        return nn.Parameter(self.memory[name], requires_grad=self.table[name].trained)

    def column_linear(self, name: str) -> "ArrayLinear":
        """A linear layer of each model; nothing is sharded, so all kinds of them are alike."""
        return ArrayLinear(name, self)

    row_linear = dense = down_linear = column_linear  # type: ignore[assignment]  # no Dense

    def embedding(self, name: str) -> "ArrayEmbedding":
        """A token table of each model."""
        return ArrayEmbedding(name, self)

    def norm(self, name: str, model: ModelConfig) -> "ArrayNorm":
        """A norm."""
        return ArrayNorm(name, model, self)

    def add_norm(self, name: str, model: ModelConfig) -> "ArrayAddNorm":
        """A norm of a sum."""
        return ArrayAddNorm(name, model, self)

    def loss(
        self, table: "ArrayEmbedding", bias: nn.Parameter | None = None, cap: float = 0.0
    ) -> "ArrayLoss":
        """Cross entropy of each model."""
        return ArrayLoss(table, bias, cap, self)

    def replicated_linear(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The linear layer of each model."""
        return array_linear(x_TD, weight, bias)

    gate = replicated_linear

    def lookup(self, ids_T: Tensor, weight: Tensor) -> Tensor:
        """The rows of each model's table."""
        return _rows(ids_T, weight)

    def dropout(self, site: str, drop: float, seed: int) -> DropoutStream:
        """The streams of all models, of their own seeds and probabilities."""
        of_scores = site.endswith(".probabilities")
        models = [config.model for config in self.configs]
        return self._streams(
            site, [m.attention_dropout if of_scores else m.dropout for m in models]
        )

    def adapter(self, name: str) -> "ArrayAdapter | None":
        """The adapters of all models, of their own ranks, scales and dropouts."""
        site = self.adapter_site(name)
        if site is None:
            return None
        loras = [config.lora for config in self.configs]
        scale = torch.tensor([lora.alpha / lora.rank for lora in loras], dtype=torch.float64)
        wide = torch.promote_types(self.dtype, torch.float32)
        scale_B11 = scale.to(self.groups.device, wide).view(-1, 1, 1)
        stream = self._streams(f"{name}.adapter", [lora.dropout for lora in loras])
        return ArrayAdapter(*site, scale_B11, stream)

    def expert_adapter(self, name: str, experts: int) -> "ArrayExpertAdapter | None":
        """The adapters of all models on their experts' common weights, of one rank."""
        site = self.adapter_site(name)
        if site is None:
            return None
        scale = [config.lora.alpha / config.lora.rank for config in self.configs]
        wide = torch.promote_types(self.dtype, torch.float32)
        scale_G = torch.tensor(scale, dtype=wide, device=self.groups.device).repeat(experts)
        return ArrayExpertAdapter(*site, scale_G, experts)

    def _streams(self, site: str, probabilities: Sequence[float]) -> DropoutStream:
        """The streams of a site, of each model's probability."""
        pairs = zip(self.configs, probabilities, strict=True)
        streams = [dropout_stream(site, drop, config.seed) for config, drop in pairs]
        keys, drops, active = zip(*streams, strict=True)
        device, shape = self.groups.device, (self.num_models, 1, 1)
        key = torch.tensor(keys, dtype=torch.int64, device=device).view(shape)
        probability = torch.tensor(drops, dtype=torch.float64, device=device).view(shape)
        return DropoutStream(key, probability, any(active))

    def expert_weights(self, weight: Tensor, experts: int) -> Tensor:
        """The matrices of all models' experts [B * experts, F, D]."""
        return weight.unflatten(1, (experts, -1)).flatten(0, 1)  # type: ignore[no-any-return]  # torch

    def experts_of_all(self, experts: Tensor, count: int) -> tuple[Tensor, int]:
        """Model b's experts are numbers b * count and so on; frozen ones are those of all, or where
        they have adapters numbers e * models + b, one expert's behind each other."""
        if self.adapts_experts:
            model = torch.arange(self.num_models, device=experts.device)
            of_model = experts.view(self.num_models, -1) * self.num_models + model[:, None]
            return of_model.view(experts.shape), count * self.num_models
        if self.adapters is not None:
            return experts, count
        first = torch.arange(self.num_models, device=experts.device) * count
        of_model = experts.view(self.num_models, -1) + first[:, None]
        return of_model.view(experts.shape), self.num_models * count

    def rows_of_experts(self, counts: Tensor | None) -> Tensor | None:
        """The rows of each expert's weight, which are those of all models."""
        return None if counts is None else counts.unflatten(0, (-1, self.num_models)).sum(1)

    @cached_property
    def adapts_experts(self) -> bool:
        """Whether routed experts have adapters."""
        return any(one.of_adapter and one.is_expert for one in self.table.values())


class ArrayLinear(nn.Module):
    """y = x W^T + b of each model, one batched GEMM: x [B * T, D] -> [B * T, F]."""

    flat_bias = None  # no other function adds it

    def __init__(self, name: str, build: ArrayLayers) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.adapter = build.adapter(name)

    def forward(
        self,
        x_TD: Tensor,
        with_bias: bool = True,
        numbers: Tensor | None = None,
        has_entered: bool = False,
        trains_bias: bool = True,
    ) -> Tensor:
        """x W^T + b, always with the bias and its gradient, and what adapters add."""
        y_TF = array_linear(x_TD, self.weight, self.bias)
        return y_TF if self.adapter is None else self.adapter(x_TD, y_TF, numbers)

    def of_activated(
        self,
        activation: Activation,
        x: Tensor,
        inner_bias: Tensor | None = None,
        with_bias: bool = True,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """activation(x) W^T + b, always with the bias."""
        assert inner_bias is None, "the layer before has added it"
        y_TF: Tensor = self(activation.forward(x, None), numbers=numbers)
        return y_TF


class ArrayAdapter(nn.Module):
    """y + scale * B A dropout(x) of each model, two batched GEMMs, after the frozen weight's GEMM
    over all rows. Adapters of lower ranks than R are padded with zeros."""

    def __init__(
        self, site: AdapterSite, parameters: AdapterSides, scale_B11: Tensor, stream: DropoutStream
    ) -> None:
        super().__init__()
        self.a, self.b = (nn.ParameterDict(parameters[side]) for side in "ab")
        self.site = site._replace(outer=site.outer * len(scale_B11))
        self.scale_B11, self.stream = scale_B11, stream

    def forward(self, x_TD: Tensor, y_TF: Tensor, numbers: Tensor | None) -> Tensor:
        """y [B * T, F] of x [B * T, D] -> [B * T, F]; numbers as of `Adapter`."""
        if self.stream.active and numbers is not None:
            x_TD = dropout(x_TD, numbers.flatten(), self.stream.key, self.stream.drop)
        a, b = (self.site.ordered(side) for side in (self.a, self.b))
        a_BRD = torch.cat(a, 1)
        b_BFR = output_blocks(self.site, b).view(len(a_BRD), -1, a_BRD.shape[1])
        z_BTR = matmul(by_model(x_TD, a_BRD), a_BRD.mT)
        z_BTR = (z_BTR * self.scale_B11).to(y_TF.dtype)
        y_BTF = by_model(y_TF, b_BFR)
        if runs_in_float32(y_TF):
            return (y_BTF + matmul(z_BTR, b_BFR.mT)).flatten(0, 1)
        return torch.baddbmm(y_BTF, z_BTR, b_BFR.mT).flatten(0, 1)


class ArrayExpertAdapter(nn.Module):
    """y_e + scale * B_e A_e x_e for each model's rows of each expert e, G = experts * models."""

    def __init__(
        self, site: AdapterSite, parameters: AdapterSides, scale_G: Tensor, experts: int
    ) -> None:
        super().__init__()
        self.a, self.b = (nn.ParameterDict(parameters[side]) for side in "ab")
        self.site = site._replace(outer=site.outer * len(scale_G) // experts)
        self.scale_G, self.experts = scale_G, experts

    def forward(self, x_ND: Tensor, y_NF: Tensor, counts_G: Tensor | None) -> Tensor:
        """y [N, F] of x [N, D], rows sorted by expert and model."""
        a, b = (self.site.ordered(side) for side in (self.a, self.b))
        a_GRD = torch.cat([self._by_expert(part) for part in a], 1)
        b_GFR = self._by_expert(output_blocks(self.site, b))
        scale_N = self._of_rows(counts_G, len(x_ND))
        z_NR = grouped_linear(x_ND, a_GRD, counts_G)
        z_NR = (z_NR * scale_N[:, None]).to(y_NF.dtype)
        return y_NF + grouped_linear(z_NR, b_GFR, counts_G)

    def _by_expert(self, matrices: Tensor) -> Tensor:
        """[models, experts * rows, columns], or flat -> [experts * models, rows, columns]."""
        models, columns = len(self.scale_G) // self.experts, matrices.shape[-1]
        of_models = matrices.reshape(models, self.experts, -1, columns)
        return of_models.transpose(0, 1).flatten(0, 1)

    def _of_rows(self, counts_G: Tensor | None, rows: int) -> Tensor:
        """The scale of each row [N]."""
        if counts_G is None:
            return self.scale_G.repeat_interleave(rows // len(self.scale_G))
        return self.scale_G.repeat_interleave(counts_G, output_size=rows)


class ArrayEmbedding(nn.Module):
    """A token table of each model; ids of a model index its own rows."""

    def __init__(self, name: str, build: ArrayLayers) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")

    def forward(self, tokens_T: Tensor) -> Tensor:
        """ids [B * T] -> x [B * T, D]."""
        return _rows(tokens_T, self.weight)


class ArrayNorm(Norm):
    """LayerNorm or RMSNorm with each model's scale and shift."""

    def __init__(self, name: str, model: ModelConfig, build: ArrayLayers) -> None:
        super().__init__(name, model, build)
        weight = self.weight[0].flatten()
        self.ones = torch.ones_like(weight)
        self.zeros = torch.zeros_like(weight)

    def forward(self, x_TD: Tensor) -> Tensor:
        """x normalised and scaled; same shape."""
        return self._scaled(norm(x_TD, *self.vectors, **self.options | self.no_offset))

    @property
    def no_offset(self) -> dict[str, Any]:
        """Keyword arguments of the kernel for several models, whose weights get their offset
        later."""
        return {"offset": 0.0} if len(self.weight) > 1 else {}

    @property
    def vectors(self) -> tuple[Tensor, Tensor | None]:
        """The scale and shift in the norm's kernel: an only model's, else ones and zeros."""
        if len(self.weight) > 1:
            return self.ones, None if self.bias is None else self.zeros
        return super().vectors

    def _scaled(self, x_TD: Tensor) -> Tensor:
        if len(self.weight) == 1:
            return x_TD
        x_BTD, weight_B1D = by_model(x_TD, self.weight), self.weight.flatten(1)[:, None]
        if self.offset:
            y_BTD = x_BTD * gain(weight_B1D, self.offset)
            y_BTD = y_BTD if self.bias is None else y_BTD + self.bias.flatten(1)[:, None]
            return y_BTD.flatten(0, 1).to(x_TD.dtype)
        if self.bias is None:
            return (x_BTD * weight_B1D).flatten(0, 1)
        return torch.addcmul(self.bias.flatten(1)[:, None], x_BTD, weight_B1D).flatten(0, 1)


class ArrayAddNorm(ArrayNorm):
    """A norm of a sum, which becomes the residual stream."""

    def forward(  # type: ignore[override]  # one more result than a Norm's
        self, x_TD: Tensor, y_TD: Tensor | None = None, y_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + y, the sum normalised and scaled); no y is nothing to add."""
        assert y_bias is None, "the layer before has added it"
        if y_TD is None:
            return x_TD, super().forward(x_TD)
        total, normal = add_norm(x_TD, y_TD, *self.vectors, **self.options | self.no_offset)
        return total, self._scaled(normal)


class ArrayLoss(TokenLoss):
    """Cross entropy of each model's logits, over its token table and maybe a bias [B, V]."""

    def __init__(
        self, table: ArrayEmbedding, bias: nn.Parameter | None, cap: float, build: ArrayLayers
    ) -> None:
        described = build.table["embedding.weight"]
        self.table, self.bias, self.cap = table, bias, cap
        self.shard = VocabShard(0, described.shape[0], build.groups.tp)

    def logits(self, x_TD: Tensor) -> Tensor:
        """x -> capped logits [B * T, V], padding columns included."""
        return softcap(array_linear(x_TD, self.table.weight, self.bias), self.cap)

    def losses(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        """Cross entropy of each label [B * T], float32 (float64 for float64 logits)."""
        logits_TV = self.logits(x_TD)
        if not torch.compiler.is_compiling():
            return VocabCrossEntropy.apply(logits_TV, labels_T, self.shard)  # type: ignore[no-untyped-call, no-any-return]  # torch
        # A graph fuses the passes over logits, which the other makes in their memory.
        wide = torch.promote_types(logits_TV.dtype, torch.float32)
        real_TV = logits_TV[:, : self.shard.valid].to(wide)
        return F.cross_entropy(real_TV, labels_T, reduction="none")


def by_model(x_TD: Tensor, weight: Tensor) -> Tensor:
    """[B * T, D] -> [B, T, D], where `weight` is [B, ...]."""
    return x_TD.view(len(weight), -1, x_TD.shape[-1])


def array_linear(x_TD: Tensor, weight_BFD: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of each model: [B * T, D] and [B, F, D] -> [B * T, F]; all
    rows share a weight [1, F, D]."""
    if len(weight_BFD) == 1:
        # flattened, not selected, whose backward would copy the gradient into zeros
        return linear(x_TD, weight_BFD.flatten(0, 1), None if bias is None else bias.flatten())
    bias = None if bias is None else bias.flatten(1)
    return _LinearFunction.apply(by_model(x_TD, weight_BFD), weight_BFD, bias).flatten(0, 1)  # type: ignore[no-untyped-call, no-any-return]  # torch


class _LinearFunction(torch.autograd.Function):
    """x W^T + b of x [B, T, D], W [B, F, D] and b [B, F], whose gradient of W has W's strides.

    Autograd makes the transpose of a gradient with other strides, which costs a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = matmul(x, weight.mT)
        return y if bias is None else y.add_(bias[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            matmul(grad, weight) if of_x else None,
            matmul(grad.mT, x) if of_weight else None,
            grad.sum(1) if of_bias else None,
        )


def _rows(ids_T: Tensor, weight_BVD: Tensor) -> Tensor:
    """Rows of each model's table: ids [B * T], weight [B, V, D] -> [B * T, D]."""
    models, rows = weight_BVD.shape[:2]
    first_B = torch.arange(models, device=ids_T.device) * rows
    of_all_T = (ids_T.view(models, -1) + first_B[:, None]).flatten()
    return F.embedding(of_all_T, weight_BVD.flatten(0, 1))
