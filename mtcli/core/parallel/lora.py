"""Low-rank adapters of sharded linear layers (LoRA, arXiv:2106.09685).

T tokens, D inputs and F outputs of this rank, R = targets * rank. The targets of a fused projection
share two GEMMs: their As are stacked [R, D], and their Bs are the blocks of a matrix [F, R] that is
zero elsewhere. That multiplies the second GEMM's FLOPs by `targets`; they are a few hundredths of
the layer's.

No collective is added. A column-parallel layer computes all of A x on every rank, then its rows of
B (A x). A row-parallel layer computes a partial A x, and the sum of its B (A x) is that of the
layer's own partial results. The matrices of experts are sharded so over etp.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.adapters import LoraTarget
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel.groups import Groups
from mtcli.kernels.dropout import dropout
from mtcli.kernels.gemm import linear, runs_in_float32
from mtcli.kernels.grouped_gemm import grouped_linear

AdapterSides = dict[str, dict[str, nn.Parameter]]  # of sides a and b by target


class AdapterSettings(NamedTuple):
    """The scale of all adapters of a model, alpha / rank, and the probability and seed of their
    dropout."""

    model: ModelConfig
    scale: float
    drop: float
    seed: int


class AdapterSite(NamedTuple):
    """The linear layer of an adapter: its targets, and this rank's shard of the weight.

    Several targets divide dim `dim` of the weight into slots; one target has all of it.
    """

    targets: tuple[LoraTarget, ...]
    slots: int  # of dim `dim`; 1 where one target has the weight
    outer: int  # product of the local sizes ahead of that dim
    shard: tuple[int, int]  # (rank, ranks) over which the columns of x are sharded

    @classmethod
    def of(
        cls, weight: Parameter, targets: tuple[LoraTarget, ...], groups: Groups
    ) -> "AdapterSite":
        """The site of `targets` in a weight on this rank."""
        dim, local, tp = targets[0].dim, weight.local_shape(groups.layout), groups.tp
        slots = 1 if dim is None else local[dim]
        shard = (tp.rank, tp.size) if weight.shard_axes[-1] == "tp" else (0, 1)
        return cls(targets, slots, prod(local[:dim]) if dim else 1, shard)

    def ordered(self, side: nn.ParameterDict) -> list[Tensor]:
        """The parameters of one side, A or B, in the targets' order."""
        return [side[target.short] for target in self.targets]


class Adapter(nn.Module):
    """Computes y + scale * B A dropout(x), in place."""

    def __init__(
        self,
        site: AdapterSite,
        parameters: AdapterSides,
        settings: AdapterSettings,
        key: int,
    ) -> None:
        """Takes A and B from `parameters`; `key` is that of dropout's random stream."""
        super().__init__()
        self.a, self.b = (nn.ParameterDict(parameters[side]) for side in "ab")
        self.site, self.settings, self.key = site, settings, key

    def forward(self, x_TD: Tensor, y_TF: Tensor, numbers: Tensor | None) -> Tensor:
        """Adds the adapter's output to y [T, F] in place. `numbers` [T] index dropout's mask; None
        drops nothing."""
        if self.settings.drop > 0.0 and numbers is not None:
            rank, ranks = self.site.shard
            # rank r's columns of a row follow those of rank r - 1
            numbers_T = numbers.flatten() * ranks + rank
            x_TD = dropout(x_TD, numbers_T, self.key, self.settings.drop)
        a, b = (self.site.ordered(side) for side in (self.a, self.b))
        z_TR = linear(x_TD, torch.cat(a))
        b_FR, scale = output_blocks(self.site, b), self.settings.scale
        if runs_in_float32(y_TF):
            return y_TF.add_(linear(z_TR, b_FR), alpha=scale)
        return y_TF.addmm_(z_TR, b_FR.T, alpha=scale)


class ExpertAdapter(nn.Module):
    """Computes y_e + scale * B_e A_e x_e for the rows of each routed expert e, in place."""

    def __init__(
        self, site: AdapterSite, parameters: AdapterSides, scale: float, experts: int
    ) -> None:
        """`experts` is the number of this rank's."""
        super().__init__()
        self.a, self.b = (nn.ParameterDict(parameters[side]) for side in "ab")
        self.site, self.scale, self.experts = site, scale, experts

    def forward(self, x_ND: Tensor, y_NF: Tensor, counts_E: Tensor | None) -> Tensor:
        """Adds the adapters' outputs to y [N, F] in place, of rows sorted by expert."""
        a, b = (self.site.ordered(side) for side in (self.a, self.b))
        a_ERD = torch.cat([part.unflatten(0, (self.experts, -1)) for part in a], 1)
        b_EFR = output_blocks(self.site, b).unflatten(0, (self.experts, -1))
        z_NR = grouped_linear(x_ND, a_ERD, counts_E)
        return y_NF.add_(grouped_linear(z_NR, b_EFR, counts_E), alpha=self.scale)


def output_blocks(site: AdapterSite, parts: Sequence[Tensor]) -> Tensor:
    """B of all targets [F, R]: target i has its rows, and columns i * rank to (i + 1) * rank."""
    if site.slots == 1:
        return parts[0]
    rank = parts[0].shape[-1]
    padded, at = [], 0
    for i, (target, part) in enumerate(zip(site.targets, parts, strict=True)):
        columns_before, after = i * rank, (len(parts) - 1 - i) * rank
        wide = F.pad(part.view(site.outer, target.num_slots, -1, rank), (columns_before, after))
        if target.first > at:
            padded.append(_zeros(wide, target.first - at))
        padded.append(wide)
        at = target.first + target.num_slots
    if at < site.slots:
        padded.append(_zeros(padded[-1], site.slots - at))
    return torch.cat(padded, 1).flatten(0, 2)


def _zeros(like: Tensor, slots: int) -> Tensor:
    return like.new_zeros(like.shape[0], slots, *like.shape[2:])
