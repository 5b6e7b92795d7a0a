"""The interface that a model asks for its layers, and what every answer to it shares.

A model names its layers by parameter and asks for a column-, head- or row-parallel linear layer, an
embedding, a norm, or the loss of a token table. Which engine answers decides how they are sharded;
`engines.py` picks one by the grid of tp ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.adapters import adapter_name, targets_of
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.lora import Adapter, AdapterSettings, AdapterSides, AdapterSite
from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.kernels.activation import ActivatedLinear, Activation
from mtcli.kernels.dropout import DropoutStream, dropout_stream
from mtcli.kernels.gemm import DEFAULT_GEMMS, DeferGradient, LinearFunction, LinearGemms
from mtcli.kernels.gemm import linear as plain_linear
from mtcli.kernels.grouped_gemm import grouped_gemms, grouped_linear
from mtcli.kernels.random import stream_key
from mtcli.kernels.triton_launch import runs_triton

Scale = float | Tensor  # on a loss; in an array of models a tensor, a number for each


def weighted_sum(losses_T: Tensor, weights_T: Tensor | None, scale: Scale) -> tuple[Tensor, Tensor]:
    """(the sum of weight times loss, scale times it to differentiate); None: weights 1.

    In an array of models, whose scale is a tensor [B], the sums are [B] too.
    """
    losses_T = losses_T if weights_T is None else losses_T * weights_T
    if isinstance(scale, Tensor):
        sums_B = losses_T.view(len(scale), -1).sum(1)
        return sums_B.detach(), (sums_B * scale).sum()
    total = losses_T.sum()
    return total.detach(), total * scale


class TokenLoss(Protocol):
    """Cross entropy of a token table's logits; N of T tokens, V columns of this rank."""

    def losses(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        """Cross entropy of each label [T], float32 (float64 for float64 logits)."""

    def loss(
        self, x_TD: Tensor, labels_T: Tensor, weights_T: Tensor | None, scale: Any
    ) -> tuple[Tensor, Tensor]:
        """(sum of weight times cross entropy, scale times it to differentiate); None: weights 1."""
        return weighted_sum(self.losses(x_TD, labels_T), weights_T, scale)

    def logits(self, x_TD: Tensor) -> Tensor:
        """x_TD -> logits_TV, padding columns included."""


@dataclass(frozen=True)
class LayerFactory(ABC):
    """Makes a rank's layers and parameters: uninitialised tensors shaped by the parameter table.

    With `sequence_parallel`, activations between the tensor parallel layers are 1/tp of the tokens
    [T/tp, D]; without, all of them [T, D] on every tp rank.
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

    @abstractmethod
    def column_linear(self, name: str) -> Any:
        """Layer(x_TD, with_bias=True) -> [T, F/tp], with a `flat_bias` [F/tp] or None.

        This and the next two take `numbers` of the T tokens too, for the dropout of adapters.
        """

    @abstractmethod
    def heads_linear(self, name: str) -> Any:
        """Layer(x_TD) -> query, key and value of this rank's heads [T, g * (q + 2) * d]."""

    @abstractmethod
    def row_linear(self, name: str) -> Any:
        """Layer(x_TF) -> x_TD, with `of_activated(activation, x, inner_bias)` for an MLP."""

    @abstractmethod
    def embedding(self, name: str) -> Any:
        """Layer(tokens_T) -> x_TD: a token table over the padded vocabulary."""

    @abstractmethod
    def norm(self, name: str, model: ModelConfig) -> Any:
        """Layer(x_TD) -> x_TD normalised and scaled."""

    @abstractmethod
    def add_norm(self, name: str, model: ModelConfig) -> Any:
        """Layer(x_TD, y_TD or None) -> (x + y, the sum normalised and scaled)."""

    @abstractmethod
    def loss(self, table: Any, bias: nn.Parameter | None = None) -> TokenLoss:
        """The loss over a table that `embedding` has made, and maybe a bias of its logits; it has
        no parameters of its own."""

    def dense(self, name: str) -> "Dense":
        """Layer(x_TD) -> x_TD: a square layer of a head, of whichever tokens a rank has."""
        return Dense(name, self, self.linear)

    def classes(self, name: str) -> "Dense":
        """Layer(x_TD) -> [N, C] of a few classes: logits, whose sum over a row's ranks counts where
        those share columns."""
        return self.dense(name)

    def parameter(self, name: str) -> nn.Parameter:
        """An uninitialised parameter of this rank, as a matrix or vector, padding included.

        An untrained one moves by steps too small for 16 bits, so it is float32 at least; a frozen
        one does not move.
        """
        described, dtype = self.table[name], self.dtype
        if not (described.trained or described.frozen):
            dtype = torch.promote_types(dtype, torch.float32)
        device = self.device or self.groups.device
        empty = torch.empty(described.stored_shape(self.groups.layout), dtype=dtype, device=device)
        return nn.Parameter(empty, requires_grad=described.trained)

    def optional(self, name: str) -> nn.Parameter | None:
        """The parameter, or None where the model has none of that name, such as a bias."""
        return self.parameter(name) if name in self.table else None

    def weight(self, name: str) -> nn.Module:
        """A module that holds the parameter `<name>.weight`, and computes nothing."""
        module = nn.Module()
        module.weight = self.parameter(f"{name}.weight")
        return module

    def adapter(self, name: str) -> nn.Module | None:
        """The adapter of a linear layer, or None where the run trains none of its targets."""
        site = self.adapter_site(name)
        if site is None or self.adapters is None:
            return None
        key = stream_key(self.adapters.seed, "dropout", f"{name}.adapter")
        return Adapter(*site, self.adapters, key)

    def adapter_site(self, name: str) -> tuple[AdapterSite, AdapterSides] | None:
        """Where the adapter of a linear layer is, and its parameters; None where it has none."""
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
        """(which, of how many) shards of the inputs' tokens x_TD has."""
        tp = self.groups.tp
        return (tp.rank, tp.size) if self.sequence_parallel else (0, 1)

    def activation_rows(self, x: Tensor) -> Tensor:
        """Of a tensor with a row for each of the inputs' tokens, the rows that x_TD has."""
        rank, shards = self.token_shard
        return x.tensor_split(shards)[rank] if shards > 1 else x

    def dropout_numbers(self, numbers_N: Tensor) -> Tensor:
        """The numbers of activations' rows, by which dropout is drawn for all of their columns."""
        return numbers_N

    def enter_experts(self, x_TD: Tensor) -> Tensor:
        """x_TD -> tokens of this rank alone with all of their columns, as the router takes them."""
        return x_TD

    def leave_experts(self, y_TD: Tensor) -> Tensor:
        """The transpose of `enter_experts`."""
        return y_TD

    def gate(self, x_TD: Tensor, weight: Tensor) -> Tensor:
        """x_TD weight^T [T, 1] of a weight [1, D] that tp ranks replicate, or shard like x_TD."""
        return plain_linear(x_TD, weight)

    def replicated_linear(self, x_TD: Tensor, weight: Tensor) -> Tensor:
        """x_TD weight^T of a weight that tp ranks replicate, in the dtype of both."""
        return F.linear(x_TD, weight)

    def lookup(self, ids_T: Tensor, weight: Tensor) -> Tensor:
        """The rows of a table that tp ranks replicate, of each id."""
        return F.embedding(ids_T, weight)

    def dropout(self, site: str, drop: float, seed: int) -> DropoutStream:
        """The random numbers of a site of dropout, and the probability there."""
        return dropout_stream(site, drop, seed)

    def expert_weights(self, weight: Tensor, experts: int) -> Tensor:
        """The matrices [experts, F, D] of a parameter of this rank's experts."""
        return weight.unflatten(0, (experts, -1))  # type: ignore[no-any-return]  # torch

    def experts_of_all(self, experts: Tensor, count: int) -> tuple[Tensor, int]:
        """(which of all models' experts are chosen [T, k], how many there are), of those of each
        token's own model."""
        return experts, count

    @property
    def linear(self) -> Callable[..., Tensor]:
        """As F.linear, with weight gradients that can wait where the schedule splits backwards."""
        if self.weight_passes is None and self.gemms is None:
            return plain_linear
        return self._linear

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return LinearFunction.apply(x, weight, bias, self.gemms or DEFAULT_GEMMS, self._defer)  # type: ignore[no-untyped-call, no-any-return]  # torch

    def activated_linear(
        self, activation: Activation, x: Tensor, bias: Tensor | None, weight: Tensor
    ) -> Tensor:
        """activation(x + bias) weight^T, which on a GPU saves x alone for backward.

        There the activation is one more write of the kernel that makes gradients. On CPU it is a
        pass of its own, and steps of a Llama of hidden size 256 took up to 1.08 times as long.
        """
        if not self._recomputes(x):
            return self.linear(activation.forward(x, bias), weight)
        gemms = self.gemms or DEFAULT_GEMMS
        return ActivatedLinear.apply(x, bias, weight, activation, gemms, self._defer)  # type: ignore[no-untyped-call, no-any-return]  # torch

    def activated_experts(
        self, activation: Activation, x_NF: Tensor, weight_EDF: Tensor, counts_E: Tensor | None
    ) -> Tensor:
        """The same of all experts' rows on a GPU, sorted by expert; no schedule splits it."""
        if not self._recomputes(x_NF):
            return grouped_linear(activation.forward(x_NF, None), weight_EDF, counts_E)
        gemms = grouped_gemms(x_NF, weight_EDF, counts_E)
        return ActivatedLinear.apply(x_NF, None, weight_EDF, activation, gemms)  # type: ignore[no-untyped-call, no-any-return]  # torch

    def _recomputes(self, x: Tensor) -> bool:
        kernel = runs_triton(x) and not torch.compiler.is_compiling()
        return kernel and self.recompute_activations

    @property
    def _defer(self) -> DeferGradient | None:
        return None if self.weight_passes is None else self.weight_passes.gradient


class Dense(nn.Module):
    """y = x W^T + b of a head, by an engine's `linear`. In one dimension tp ranks replicate it:
    heads alone are small enough for that."""

    def __init__(self, name: str, build: LayerFactory, linear: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.bias = build.parameter(f"{name}.bias")
        self.linear = linear

    def forward(self, x_TD: Tensor) -> Tensor:
        """x_TD [N, D] -> [N, F]."""
        return self.linear(x_TD, self.weight, self.bias)
