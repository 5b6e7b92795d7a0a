"""Mixture of experts: routes each token to k of E feed-forward networks, and to a shared one if
any.

y = sum over chosen experts of weight * expert(x) (arXiv:1701.06538; Mixtral arXiv:2401.04088;
Qwen2-MoE arXiv:2407.10671). N copies of tokens, F an expert's width, E/ep local experts.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.mlp import GatedMlp, Mlp
from mtcli.core.model.router import Router
from mtcli.core.parallel.expert import Dispatch
from mtcli.core.parallel.factory import LayerFactory
from mtcli.core.parallel.groups import Axis
from mtcli.kernels.activation import activation_of
from mtcli.kernels.gradient_sink import GradientSink
from mtcli.kernels.grouped_gemm import add_by_expert, grouped_linear, split_rows
from mtcli.kernels.triton_launch import runs_triton


class ExpertArray(nn.Module):
    """This rank's experts: E/ep of them, each F/etp wide."""

    def __init__(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        super().__init__()
        # No schedule splits its backward, and float8 would multiply experts one after another.
        build = replace(build, weight_passes=None, gemms=None)
        self.up_name = "gate_up" if model.is_gated else "up"
        self.count = model.num_experts // build.groups.axes["ep"].size
        self.add_module(self.up_name, build.expert_weight(f"{name}.{self.up_name}", self.count))
        self.down = build.expert_weight(f"{name}.down", self.count)
        self.activation, self.build = activation_of(model.activation, model.activation_clamp), build

    def forward(self, x_ND: Tensor, counts_E: Tensor | None) -> Tensor:
        """Rows sorted by local expert -> results [N, D], partial sums over etp.

        On CPU one expert at a time, on a GPU and with adapters all at once.
        """
        build, activation = self.build, self.activation
        up, down = self.get_submodule(self.up_name), self.down
        up_EFD, down_EDF = (
            build.expert_weights(cast(Tensor, module.weight), self.count) for module in (up, down)
        )
        up_EF, down_ED = self._biases(up), self._biases(down)
        if down_ED is not None:
            down_ED = _padded(down_ED, build.groups.axes["etp"])
        if up.adapter is not None or down.adapter is not None:
            rows_E = build.rows_of_experts(counts_E)
            inner_NF = add_by_expert(grouped_linear(x_ND, up_EFD, rows_E), up_EF, rows_E)
            x_NF = activation.forward(_adapted(up, x_ND, inner_NF, counts_E), None)
            y_ND = _adapted(down, x_NF, grouped_linear(x_NF, down_EDF, rows_E), counts_E)
            return add_by_expert(y_ND, down_ED, rows_E)
        sinks = [build.gradient_sinks.of(cast(Tensor, module.weight)) for module in (up, down)]
        if runs_triton(x_ND):
            inner_NF = grouped_linear(x_ND, up_EFD, counts_E, sinks[0])
            inner_NF = add_by_expert(inner_NF, up_EF, counts_E)
            y_ND = build.activated_experts(activation, inner_NF, down_EDF, counts_E, sinks[1])
            return add_by_expert(y_ND, down_ED, counts_E)
        rows = split_rows(x_ND, counts_E, len(up_EFD))
        matrices = up_EFD.unbind(0), down_EDF.unbind(0)
        biases = (repeat(None) if bias is None else bias.unbind(0) for bias in (up_EF, down_ED))
        sinks_E = (_of_experts(sink, self.count) for sink in sinks)
        parts = []
        of_experts = zip(rows, *matrices, *biases, *sinks_E, strict=False)
        for x, up_FD, down_DF, up_F, down_D, up_sink, down_sink in of_experts:
            inner = build.linear(x, up_FD, up_F, up_sink)
            y = build.activated_linear(activation, inner, None, down_DF, down_sink)
            parts.append(y if down_D is None else y + down_D)
        return torch.cat(parts)

    def _biases(self, module: nn.Module) -> Tensor | None:
        """The biases [E, F] of all experts' matrices, or None."""
        bias = cast(Tensor | None, module.bias)
        return None if bias is None else self.build.expert_weights(bias, self.count).flatten(1)


def _adapted(module: nn.Module, x_ND: Tensor, y_NF: Tensor, counts_E: Tensor | None) -> Tensor:
    """Adds the outputs of the matrix's adapters, if it has any, to its outputs y [N, F]."""
    adapter = cast(nn.Module | None, module.adapter)
    return y_NF if adapter is None else cast(Tensor, adapter(x_ND, y_NF, counts_E))


def _of_experts(sink: GradientSink | None, experts: int) -> Iterable[GradientSink | None]:
    """The sink of each expert's rows of a weight."""
    if sink is None:
        return repeat(None)
    rows = sink.rows // experts
    return [sink.part(expert * rows, rows) for expert in range(experts)]


def _padded(bias_ED: Tensor, etp: Axis) -> Tensor:
    """The columns [E, D/etp] that this rank adds to its partial sums, and zeros in the others."""
    width = bias_ED.shape[1]
    return F.pad(bias_ED, (etp.rank * width, (etp.size - 1 - etp.rank) * width))


class MixtureOfExperts(nn.Module):
    """Router, dispatch, experts, and the shared expert with its gate where the model has one."""

    def __init__(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        super().__init__()
        self.router = Router(f"{name}.router", model, build)
        self.experts = ExpertArray(f"{name}.experts", model, build)
        self.dispatcher, self.groups, self.build = build.dispatcher, build.groups, build
        self.has_shared = model.shared_expert_ffn_hidden_size > 0
        self.has_gate = model.shared_expert_gate
        if self.has_shared:
            shared = GatedMlp if model.is_gated else Mlp
            self.shared_expert = shared(f"{name}.shared_expert", model, build)
        if self.has_gate:
            self.shared_expert_gate = build.weight(f"{name}.shared_expert_gate")

    output_bias = None  # experts' biases are of their own rows

    def forward(self, x_TD: Tensor, inputs: Inputs, with_bias: bool = True) -> Tensor:
        """x_TD [T/tp, D] -> [T/tp, D], always with the biases."""
        routed_TD, routing, statistics = self.router(self.build.to_tokens(x_TD), inputs)
        capacity = self.router.capacity(inputs)
        tokens = routed_TD, routing, self.experts, self.groups, capacity
        dispatch = Dispatch(self.dispatcher, *tokens)
        if not self.has_shared:
            y_TD = self.build.to_columns(dispatch.finish())
            return self.router.counted(y_TD, statistics)
        inner = self.shared_expert.begin(x_TD, inputs)  # while numbers or tokens travel
        dispatch.advance()
        shared = self.shared_expert.finish(inner, inputs)  # while tokens or results travel
        if self.has_gate:
            weight = cast(Tensor, self.shared_expert_gate.weight)
            shared = self.build.gate(x_TD, weight).sigmoid() * shared
        return self.router.counted(self.build.to_columns(dispatch.finish()) + shared, statistics)
