"""The interface by which a model builds its layers, and the code that its engines share.

A model names its layers by parameter and asks for a column- or row-parallel linear layer, an
embedding, a norm, or the loss of a token table. The engine, which `engines.py` chooses by the
grid of tp ranks, decides how they are sharded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.adapters import adapter_name, targets_of
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel.groups import Axis, Groups
from mtcli.core.parallel.lora import (
    Adapter,
    AdapterSettings,
    AdapterSides,
    AdapterSite,
    ExpertAdapter,
)
from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.kernels.activation import ActivatedLinear, Activation
from mtcli.kernels.dropout import DropoutStream, dropout_stream
from mtcli.kernels.embedding import embedding
from mtcli.kernels.gemm import (
    DEFAULT_GEMMS,
    DeferGradient,
    LinearFunction,
    LinearGemms,
    adds_to,
)
from mtcli.kernels.gemm import linear as plain_linear
from mtcli.kernels.gradient_sink import GradientSink, GradientSinks
from mtcli.kernels.grouped_gemm import grouped_gemms, grouped_linear
from mtcli.kernels.random import stream_key
from mtcli.kernels.stored_weight import StoredWeight
from mtcli.kernels.triton_launch import runs_triton

Exchange = Callable[[Tensor, Axis], Tensor]
Scale = float | Tensor  # on a loss; in an array of models a tensor, a number for each


def weighted_sum(losses_T: Tensor, weights_T: Tensor | None, scale: Scale) -> tuple[Tensor, Tensor]:
    """(sum of weight * loss, that sum times `scale`, to differentiate); weights of None are 1.

    In an array of models, whose scale is a tensor [B], both are [B].
    """
    losses_T = losses_T if weights_T is None else losses_T * weights_T
    if isinstance(scale, Tensor):
        sums_B = losses_T.view(len(scale), -1).sum(1)
        return sums_B.detach(), (sums_B * scale).sum()
    total = losses_T.sum()
    return total.detach(), total * scale


def as_it_is(x: Tensor, axis: Axis) -> Tensor:
    """Returns x: the exchange of ranks that exchange nothing."""
    return x


class TokenLoss(Protocol):
    """The cross entropy of a token table's logits; N of T tokens, V columns of this rank."""

    def losses(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        """The cross entropy of each label [T], float32 (float64 for float64 logits)."""

    def loss(
        self, x_TD: Tensor, labels_T: Tensor, weights_T: Tensor | None, scale: Any
    ) -> tuple[Tensor, Tensor]:
        """(sum of weight * cross entropy, that times `scale`, to differentiate); weights of None
        are 1."""
        return weighted_sum(self.losses(x_TD, labels_T), weights_T, scale)

    def logits(self, x_TD: Tensor) -> Tensor:
        """The logits [T, V] of activations x_TD, padding columns included."""


@dataclass(frozen=True)
class LayerFactory(ABC):
    """Builds a rank's layers and parameters, uninitialised, in the parameter table's shapes.

    With `sequence_parallel` the activations between tensor parallel layers are [T/tp, D]; without,
    [T, D] on every tp rank.
    """

    table: Mapping[str, Parameter]
    groups: Groups
    dtype: torch.dtype
    sequence_parallel: bool = True
    cp_mode: str = "ring"
    dispatcher: str = "all_to_all"
    weight_passes: WeightPasses | None = None  # where the schedule splits the backward
    gemms: LinearGemms | None = None  # of linear layers, where they are not torch's own
    recompute_activations: bool = True  # in the backward; a recomputed block has them by then
    device: torch.device | None = None  # of new parameters; None is the rank's
    adapters: AdapterSettings | None = None  # where adapters are trained
    num_models: int = 1  # whose activations follow each other in those of all: [models * T, D]
    frees_weights: bool = False  # of a block at its end: zero = 3
    gradient_sinks: GradientSinks = field(default_factory=GradientSinks)  # of weights' gradients
    tp_overlap: bool = True  # of tensor parallel collectives and GEMMs, on a GPU

    @property
    def enter(self) -> Exchange:
        """The collective on activations ahead of a layer whose outputs tp shards; here none."""
        return as_it_is

    @abstractmethod
    def column_linear(self, name: str) -> Any:
        """Layer(x_TD, with_bias=True, trains_bias=True) -> [T, F/tp], with a `flat_bias` [F/tp] or
        None. `x_TD` may have entered.

        Like `row_linear` it also takes `numbers` [T], for the dropout of adapters.
        """

    def down_linear(self, name: str) -> "Dense":
        """Layer(x) -> y: a linear layer to a narrow latent, of the tokens of `to_tokens`, whose
        weight tp ranks replicate."""
        return Dense(name, self, self.linear)

    def up_linear(self, name: str) -> Any:
        """`column_linear` of latents that have entered."""
        return self.column_linear(name)

    @property
    def enter_latents(self) -> Exchange:
        """The collective on latents of the tokens of `to_tokens` ahead of an `up_linear`."""
        return self.enter

    def share_heads(self, name: str) -> nn.Module:
        """Layer(y_TF) -> query, key and value of this rank's heads [T, g * (q + 2) * d], from the
        columns that its `column_linear` computes."""
        return nn.Identity()

    @abstractmethod
    def row_linear(self, name: str) -> Any:
        """Layer(x_TF, with_bias=True) -> x_TD, with a `flat_bias` [D/c] or None, and
        `of_activated(activation, x, inner_bias, with_bias=True)` for an MLP."""

    @abstractmethod
    def embedding(self, name: str) -> Any:
        """Layer(tokens_T) -> x_TD: a token table over the padded vocabulary."""

    @abstractmethod
    def norm(self, name: str, model: ModelConfig) -> Any:
        """Layer(x_TD) -> x_TD normalised and scaled."""

    @abstractmethod
    def add_norm(self, name: str, model: ModelConfig) -> Any:
        """Layer(x_TD, y_TD or None, y_bias or None) -> (x + y + y_bias, the sum normalised and
        scaled)."""

    @abstractmethod
    def loss(self, table: Any, bias: nn.Parameter | None = None, cap: float = 0.0) -> TokenLoss:
        """The loss over the table of an `embedding`, with an optional bias and a soft cap of its
        logits; a cap of 0 is none."""

    def dense(self, name: str) -> "Dense":
        """Layer(x_TD) -> x_TD: a square linear layer of a head, on the tokens of this rank."""
        return Dense(name, self, self.linear)

    def classes(self, name: str) -> "Dense":
        """Layer(x_TD) -> [N, C]: logits of a few classes, partial sums where a row's ranks
        shard D."""
        return self.dense(name)

    def parameter(self, name: str) -> nn.Parameter:
        """An uninitialised parameter of this rank, as a matrix or vector, padding included.

        One that neither trains nor is frozen (a router's bias) takes steps too small for 16 bits,
        so it is float32 at least.
        """
        described, dtype = self.table[name], self.dtype
        if not (described.trained or described.frozen):
            dtype = torch.promote_types(dtype, torch.float32)
        device = self.device or self.groups.device
        empty = torch.empty(described.stored_shape(self.groups.layout), dtype=dtype, device=device)
        return nn.Parameter(empty, requires_grad=described.trained)

    def optional(self, name: str) -> nn.Parameter | None:
        """The parameter; None where the model has none of that name, such as a bias."""
        return self.parameter(name) if name in self.table else None

    def weight(self, name: str) -> nn.Module:
        """A module that has the parameter `<name>.weight`, `<name>.bias` or None, and computes
        nothing."""
        module = nn.Module()
        module.weight = self.parameter(f"{name}.weight")
        module.register_parameter("bias", self.optional(f"{name}.bias"))
        return module

    def adapter(self, name: str) -> nn.Module | None:
        """The adapter of a linear layer; None where the run trains none of its targets."""
        site = self.adapter_site(name)
        if site is None or self.adapters is None:
            return None
        key = stream_key(self.adapters.seed, "dropout", f"{name}.adapter")
        return Adapter(*site, self.adapters, key)

    def expert_weight(self, name: str, experts: int) -> nn.Module:
        """A module like `weight`'s, of the matrices of this rank's routed experts, with their
        `adapter`: (x, y, rows of each expert) -> y with its outputs, or None."""
        module = self.weight(name)
        module.register_module("adapter", self.expert_adapter(name, experts))
        return module

    def expert_adapter(self, name: str, experts: int) -> nn.Module | None:
        """The adapters of routed experts' matrices; None where the run trains none of their
        targets."""
        site = self.adapter_site(name)
        if site is None or self.adapters is None:
            return None
        return ExpertAdapter(*site, self.adapters.scale, experts)

    def adapter_site(self, name: str) -> tuple[AdapterSite, AdapterSides] | None:
        """The site of a linear layer's adapter and its parameters; None where it has none."""
        if self.adapters is None:
            return None
        weight = self.table[f"{name}.weight"]
        targets = tuple(
            target
            for target in targets_of(weight, self.adapters.model)
            if adapter_name(weight.name, "a", target) in self.table
        )
        if not targets:
            return None
        parameters = {
            side: {
                target.short: self.parameter(adapter_name(weight.name, side, target))
                for target in targets
            }
            for side in "ab"
        }
        return AdapterSite.of(weight, targets, self.groups), parameters

    def my_tokens(self, x: Tensor) -> Tensor:
        """This rank's shard of dim 0 of a tensor that tp ranks replicate: [T] -> [T/tp]."""
        tp = self.groups.tp
        return x.tensor_split(tp.size)[tp.rank] if self.sequence_parallel and tp.size > 1 else x

    @property
    def token_shard(self) -> tuple[int, int]:
        """(index, number) of the shard of the inputs' tokens that x_TD has."""
        tp = self.groups.tp
        return (tp.rank, tp.size) if self.sequence_parallel else (0, 1)

    def activation_rows(self, x: Tensor) -> Tensor:
        """Selects the rows of x_TD from a tensor with a row per token of the inputs."""
        rank, shards = self.token_shard
        return x.tensor_split(shards)[rank] if shards > 1 else x

    def dropout_numbers(self, numbers_N: Tensor) -> Tensor:
        """The row numbers that index dropout's mask, for the columns that this rank has."""
        return numbers_N

    def to_tokens(self, x_TD: Tensor) -> Tensor:
        """x_TD -> tokens of this rank alone, with all D columns: what routers and latents read."""
        return x_TD

    def to_columns(self, y_TD: Tensor) -> Tensor:
        """The transpose of `to_tokens`."""
        return y_TD

    def gate(self, x_TD: Tensor, weight: Tensor) -> Tensor:
        """x_TD weight^T [T, 1], of a weight [1, D] that is sharded as the columns of x_TD are."""
        return plain_linear(x_TD, weight)

    def replicated_linear(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x_TD weight^T + bias of what tp ranks replicate, in the common dtype of all."""
        return F.linear(x_TD, weight, bias)

    def lookup(self, ids_T: Tensor, weight: Tensor) -> Tensor:
        """The rows `ids_T` of a table that tp ranks replicate."""
        return embedding(ids_T, weight, self.gradient_sinks.of(weight))

    def dropout(self, site: str, drop: float, seed: int) -> DropoutStream:
        """The random stream and probability of dropout at a site."""
        return dropout_stream(site, drop, seed)

    def expert_weights(self, weight: Tensor, experts: int) -> Tensor:
        """The matrices [experts, F, D] of a parameter that stacks this rank's experts."""
        return weight.unflatten(0, (experts, -1))  # type: ignore[no-any-return]  # torch

    def rows_of_experts(self, counts: Tensor | None) -> Tensor | None:
        """The rows of each expert's weight, from those of each numbered by `experts_of_all`."""
        return counts

    def experts_of_all(self, experts: Tensor, count: int) -> tuple[Tensor, int]:
        """(chosen experts [T, k], number of experts), numbered over all models of an array."""
        return experts, count

    def linear(
        self,
        x: Tensor,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        sink: GradientSink | None = None,
    ) -> Tensor:
        """F.linear, whose weight gradients are summed in a sink, by default the weight's, and can
        wait for the W pass of a schedule that splits backwards."""
        if isinstance(weight, StoredWeight):
            return weight.linear(x, bias)
        sink = self.sink_of(x, weight, sink)
        if sink is None and self.weight_passes is None and self.gemms is None:
            return plain_linear(x, weight, bias)
        gemms = self.gemms or DEFAULT_GEMMS
        return LinearFunction.apply(x, weight, bias, gemms, self.defer, sink)  # type: ignore[no-untyped-call, no-any-return]  # torch

    def sink_of(
        self, x: Tensor, weight: Tensor, sink: GradientSink | None = None
    ) -> GradientSink | None:
        """Where the GEMM of the gradient of a weight of x adds it, by default the weight's sink;
        None where autograd returns it."""
        sink = sink or self.gradient_sinks.of(weight)
        return sink if sink is not None and adds_to(x, weight, sink.dtype) else None

    def activated_linear(
        self,
        activation: Activation,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        sink: GradientSink | None = None,
    ) -> Tensor:
        """activation(x + bias) weight^T, which on a GPU saves x alone for backward.

        On a GPU the kernel of the activation's gradient recomputes the activation as a second
        output. On CPU recomputing is a pass of its own: steps of a Llama of hidden size 256 took up
        to 1.08 times as long.
        """
        if not self.recomputes(x):
            return self.linear(activation.forward(x, bias), weight, sink=sink)
        to = self.defer, sink or self.gradient_sinks.of(weight)
        gemms = self.gemms or DEFAULT_GEMMS
        return ActivatedLinear.apply(x, bias, weight, activation, gemms, *to)  # type: ignore[no-untyped-call, no-any-return]  # torch

    def activated_experts(
        self,
        activation: Activation,
        x_NF: Tensor,
        weight_EDF: Tensor,
        counts_E: Tensor | None,
        sink: GradientSink | None = None,
    ) -> Tensor:
        """`activated_linear` of all experts' rows, sorted by expert; its backward is never
        split."""
        if not self.recomputes(x_NF):
            return grouped_linear(activation.forward(x_NF, None), weight_EDF, counts_E, sink)
        gemms = grouped_gemms(x_NF, weight_EDF, counts_E)
        return ActivatedLinear.apply(x_NF, None, weight_EDF, activation, gemms, None, sink)  # type: ignore[no-untyped-call, no-any-return]  # torch

    def recomputes(self, x: Tensor) -> bool:
        """Whether the backward recomputes the activation of x, in the kernel of its gradient."""
        kernel = runs_triton(x) and not torch.compiler.is_compiling()
        return kernel and self.recompute_activations

    @property
    def defer(self) -> DeferGradient | None:
        """What leaves weight gradients to the W pass; None where no schedule splits backwards."""
        return None if self.weight_passes is None else self.weight_passes.gradient


class Dense(nn.Module):
    """y = x W^T + b by a `linear` of an engine's: of a head, or down to a narrow latent."""

    def __init__(self, name: str, build: LayerFactory, linear: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.optional(f"{name}.bias")
        self.linear, self.adapter = linear, build.adapter(name)

    def forward(self, x_TD: Tensor, numbers: Tensor | None = None) -> Tensor:
        """x_TD [N, D] -> [N, F]; `numbers` [N] index the dropout mask of adapters."""
        y_TF = self.linear(x_TD, self.weight, self.bias)
        return y_TF if self.adapter is None else cast(Tensor, self.adapter(x_TD, y_TF, numbers))
