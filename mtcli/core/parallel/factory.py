"""Making a rank's parameters: empty tensors of the shapes that the parameter table gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.kernels.activation import Activation
from mtcli.kernels.gemm import DEFAULT_GEMMS, LinearGemms, linear
from mtcli.kernels.grouped_gemm import grouped_gemms, grouped_linear
from mtcli.kernels.launch import runs_triton


@dataclass(frozen=True)
class LayerFactory:
    """What a module needs to make its parameters: their table, this rank's groups and the dtype.

    With `sequence_parallel`, what lies between the tensor parallel regions holds 1/tp of the
    tokens [T/tp, D]; without, all of them [T, D] on every tp rank.
    """

    table: Mapping[str, Parameter]
    groups: Groups
    dtype: torch.dtype
    sequence_parallel: bool = True
    cp_mode: str = "ring"
    dispatcher: str = "all_to_all"
    weight_work: WeightPasses | None = None  # where the schedule splits the backward
    products: LinearGemms | None = None  # of linear layers, where they are not torch's own
    remakes_activations: bool = True  # in the backward; a recomputed block has them by then
    device: torch.device | None = None  # of new parameters; None is the rank's

    @property
    def linear(self) -> Callable[..., Tensor]:
        """As F.linear, with weight gradients that can wait where the schedule splits."""
        if self.weight_work is None and self.products is None:
            return linear
        return self._work.linear

    def activated_linear(
        self, activation: Activation, x: Tensor, bias: Tensor | None, weight: Tensor
    ) -> Tensor:
        """activation(x + bias) weight^T, which on a GPU keeps x alone for the backward.

        There the result is one more write of the kernel that makes gradients. On CPU it is a pass
        of its own, and steps of a Llama of hidden size 256 took up to 1.08 times as long.
        """
        if not self._remakes(x):
            return self.linear(activation.forward(x, bias), weight)
        return self._work.activated_linear(activation, x, bias, weight)

    def activated_experts(
        self, activation: Activation, x_NF: Tensor, weight_EDF: Tensor, counts: list[int]
    ) -> Tensor:
        """The same of all experts' rows on a GPU, sorted by expert; no schedule splits it."""
        if not self._remakes(x_NF):
            return grouped_linear(activation.forward(x_NF, None), weight_EDF, counts)
        work = WeightPasses(grouped_gemms(x_NF, weight_EDF, counts))
        return work.activated_linear(activation, x_NF, None, weight_EDF)

    def _remakes(self, x: Tensor) -> bool:
        kernel = runs_triton(x) and not torch.compiler.is_compiling()
        return kernel and self.remakes_activations

    @property
    def _work(self) -> WeightPasses:
        return self.weight_work or WeightPasses(self.products or DEFAULT_GEMMS)

    def parameter(self, name: str) -> nn.Parameter:
        """An uninitialised parameter of this rank, as a matrix or vector, padding included.

        What is not trained is moved by steps too small for 16 bits, so it is float32 at least.
        """
        described, dtype = self.table[name], self.dtype
        if not described.trained:
            dtype = torch.promote_types(dtype, torch.float32)
        device = self.device or self.groups.device
        empty = torch.empty(described.stored_shape(self.groups.layout), dtype=dtype, device=device)
        return nn.Parameter(empty, requires_grad=described.trained)

    def optional(self, name: str) -> nn.Parameter | None:
        """The parameter, or None where the model has none of that name, such as a bias."""
        return self.parameter(name) if name in self.table else None

    def my_tokens(self, x: Tensor) -> Tensor:
        """This rank's part of dim 0 of something that every tp rank holds whole: [T] -> [T/tp]."""
        if not self.sequence_parallel:
            return x
        tp = self.groups.tp
        return x.tensor_split(tp.size)[tp.rank] if tp.size > 1 else x
