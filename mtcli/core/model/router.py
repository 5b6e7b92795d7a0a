"""The router of a mixture of experts: scores, top-k, capacity, and auxiliary load balancing losses.

Logits may have a trained bias, `linear_bias`, as in gpt-oss. Another bias per expert, `bias`, is
added to scores for the choice alone; weights, capacity and losses use the scores (arXiv:2408.15664,
section 3). `expert_balance.py` updates it. `router_figures.py` names what is counted of a step.

Padding tokens are routed as others are, but capacity, losses and loads count real tokens alone.

T local tokens, E experts, k chosen; s tokens of a sequence. All of it in float32 (float64 stays).
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.router_figures import summed_figures
from mtcli.core.parallel.collectives import all_gather, all_reduce
from mtcli.core.parallel.context import in_sequence, zigzag
from mtcli.core.parallel.expert import Routing
from mtcli.core.parallel.factory import LayerFactory, Scale
from mtcli.kernels.top_k import TopKRouting, route

Copies = TypeVar("Copies", float, Tensor)


class Router(nn.Module):
    """A linear layer over experts, and the choice, weights and losses computed from its logits."""

    def __init__(self, name: str, model: ModelConfig, build: LayerFactory) -> None:
        super().__init__()
        self.weight = build.parameter(f"{name}.weight")
        self.linear_bias = build.optional(f"{name}.linear_bias")
        self.bias = build.optional(f"{name}.bias")
        self.moves = self.bias is not None and not build.table[f"{name}.bias"].frozen
        self.layer = int(name.split(".")[1])
        size, device = model.num_experts + len(summed_figures(model)), build.groups.device
        self.statistics = torch.zeros(size, dtype=torch.float64, device=device)
        self.load_E = self.statistics[: model.num_experts]
        self.model, self.build = model, build
        self.choice = TopKRouting(
            model.top_k,
            model.router_score == "softmax",
            model.normalize_top_k,
            model.router_groups,
            model.router_top_groups,
        )

    def forward(self, x_TD: Tensor, inputs: Inputs) -> tuple[Tensor, Routing]:
        """(x_TD with the auxiliary losses' gradients attached, the routing of its tokens)."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        bias = None if self.linear_bias is None else self.linear_bias.to(wide)
        logits_TE = self.build.replicated_linear(x_TD.to(wide), self.weight.to(wide), bias)
        scores_TE, weights, experts = route(logits_TE, self.bias, self.choice)
        if self.model.routed_scale != 1.0:
            weights = weights * self.model.routed_scale
        real_T = None
        if inputs.padding is not None:
            real_T = ~self.build.my_tokens(inputs.padding.flatten())
        kept_Tk = self._kept(scores_TE.detach(), experts, real_T, inputs)
        if isinstance(inputs.aux_scale, Tensor) or inputs.aux_scale:
            if not self.choice.softmax:
                scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
            if real_T is not None:
                scores_TE = scores_TE * real_T[:, None]
            losses = self._losses(logits_TE, scores_TE, experts, real_T, inputs)
            total = self._weighted(losses, like=logits_TE)
            x_TD = _WithLoss.apply(x_TD, total, inputs.aux_scale)  # type: ignore[no-untyped-call]  # torch
            # A forward in a backward recomputes one that has counted; an array has several models.
            if self.build.num_models == 1 and torch._C._current_graph_task_id() < 0:
                self._count(scores_TE, experts, real_T, kept_Tk, losses)
        numbers, count = self.build.experts_of_all(experts, self.model.num_experts)
        return x_TD, Routing(weights, numbers, kept_Tk, count)

    @torch.no_grad()
    def _count(
        self,
        scores_TE: Tensor,
        experts: Tensor,
        real_T: Tensor | None,
        kept_Tk: Tensor | None,
        losses: dict[str, Tensor],
    ) -> None:
        """Adds this micro-batch to the statistics of the step; scores of padding are 0."""
        ones = torch.ones_like(experts) if real_T is None else real_T[:, None].expand_as(experts)
        copies = ones.flatten().to(self.load_E.dtype)
        self.load_E.scatter_add_(0, experts.flatten(), copies)
        sums = {"entropy": torch.special.entr(scores_TE).sum()} | losses
        if kept_Tk is not None:
            sums["kept"] = kept_Tk.sum()
        figures = [sums[name].double().view(1) for name in summed_figures(self.model)]
        self.statistics[len(self.load_E) :] += torch.cat(figures)

    def capacity(self, inputs: Inputs) -> int:
        """Rows per expert and rank where all are padded to the capacity; else 0."""
        if not self.model.pad_to_capacity:
            return 0
        b, s = inputs.shape
        tokens = b * s // (self.build.groups.tp.size if self.build.sequence_parallel else 1)
        if self.model.drop_scope == "sub_sequence":
            return math.ceil(self._room(tokens * self.model.top_k))
        # a sequence's tokens may all be on one rank: as many as its share allows, for each sequence
        sequence = math.ceil(self._room(s * self.build.groups.cp.size * self.model.top_k))
        return min(tokens, b * sequence)

    def _room(self, copies: Copies) -> Copies:
        """The number of rows that an expert has for `copies` token copies, to be rounded up."""
        return copies / self.model.num_experts * self.model.capacity_factor

    def _kept(
        self, scores_TE: Tensor, experts: Tensor, real_T: Tensor | None, inputs: Inputs
    ) -> Tensor | None:
        """[T, k] bool: the copies within their experts' capacity; None without a capacity."""
        if not self.model.capacity_factor:
            return None
        chosen = _chosen(scores_TE, experts, real_T)
        if self.model.drop_scope == "sub_sequence":
            shape = (self.build.num_models, -1, chosen.shape[1])
            sets = (scores_TE * chosen).view(shape), chosen.view(shape)
            keeps = self._within_capacity(*sets).flatten(0, 1)
        else:
            full = [self._full_sequences(x, inputs) for x in (scores_TE * chosen, chosen)]
            keeps = self._my_part(self._within_capacity(*full))
        return keeps.gather(1, experts)

    def _within_capacity(self, scores_bsE: Tensor, chosen_bsE: Tensor) -> Tensor:
        """[b, s, E] bool: the chosen tokens of each row that each expert keeps."""
        copies_b = chosen_bsE.sum((1, 2), dtype=torch.float64)
        limit = self._room(copies_b).ceil()[:, None, None]
        if self.model.drop_policy == "position":
            return (chosen_bsE.cumsum(1) <= limit) & (chosen_bsE > 0)
        # Equal tokens, as in a run of spaces, have equal scores but for rounding, which depends on
        # the layout. So scores are compared to 16 bits, and of equal ones the earlier wins.
        scores = (scores_bsE * 2.0**16).round().masked_fill(chosen_bsE == 0, -1.0)
        rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (rank < limit) & (chosen_bsE > 0)

    def _full_sequences(self, x_TE: Tensor, inputs: Inputs) -> Tensor:
        """All-gathers [T, E] over the ranks that share sequences, to [b, s, E] in order of
        position."""
        groups, (b, n) = self.build.groups, inputs.shape
        axis = groups.axes["sequence"] if self.build.sequence_parallel else groups.cp
        parts = all_gather(x_TE, axis).view(groups.cp.size, b, n, -1)
        flat = parts.transpose(0, 1).reshape(b, groups.cp.size * n, -1)
        return in_sequence(flat, groups.cp, 1)

    def _my_part(self, x_bsE: Tensor) -> Tensor:
        cp = self.build.groups.cp
        positions = zigzag(x_bsE.shape[1], cp.size, cp.rank, x_bsE.device)
        return self.build.my_tokens(x_bsE[:, positions].flatten(0, 1))

    def _losses(
        self,
        logits_TE: Tensor,
        scores_TE: Tensor,
        experts: Tensor,
        real_T: Tensor | None,
        inputs: Inputs,
    ) -> dict[str, Tensor]:
        """This rank's part of each auxiliary loss [models] that is trained, times the number of
        tokens of its mean. `real_T` is False for padding, whose scores are 0."""
        m, models, losses = self.model, self.build.num_models, {}
        if m.z_loss_coeff:
            squares_T = logits_TE.logsumexp(-1).square()
            if real_T is not None:
                squares_T = squares_T * real_T
            losses["z_loss"] = squares_T.view(models, -1).sum(1)
        if m.aux_loss_coeff or m.sequence_aux_loss_coeff:
            chosen = _chosen(scores_TE, experts, real_T)
            sequence_sums = [self._sequence_sums(x, inputs) for x in (scores_TE, chosen)]
            if m.aux_loss_coeff:
                batch = [x.view(models, -1, x.shape[1]).sum(1) for x in sequence_sums]
                losses["aux_loss"] = self._balance(batch[0], batch[1], "micro_batch")
            if m.sequence_aux_loss_coeff:
                of_sequences = self._balance(sequence_sums[0], sequence_sums[1], "sequence")
                losses["sequence_aux_loss"] = of_sequences
        return losses

    def _weighted(self, losses: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The sum of the auxiliary losses, each times its coefficient: [models]."""
        total = like.new_zeros(self.build.num_models)
        for name, loss in losses.items():
            total = total + getattr(self.model, f"{name}_coeff") * loss
        return total

    def _sequence_sums(self, x_TE: Tensor, inputs: Inputs) -> Tensor:
        """[b, E]: this rank's sums over the tokens of each sequence."""
        (b, n), tokens = inputs.shape, len(x_TE)
        if tokens < b * n:  # this rank's, of those that tp ranks share
            first_token = self.build.groups.tp.rank * tokens
            x_TE = F.pad(x_TE, (0, 0, first_token, b * n - first_token - tokens))
        return x_TE.view(b, n, -1).sum(1)

    def _balance(self, scores_bE: Tensor, chosen_bE: Tensor, scope: str) -> Tensor:
        """Switch's load balancing loss E * sum_e f_e P_e (arXiv:2101.03961, section 2.2), times the
        tokens of its set: [models].

        Arguments are sums over each of b sets of tokens, a sequence or the micro-batch. f counts
        tokens of all ranks that share a set; P is this rank's part of the mean.
        """
        groups = self.build.groups
        axis = groups.axes[scope] if self.build.sequence_parallel else groups.cp
        copies_bE = all_reduce(chosen_bE, axis)  # top_k of each token
        shares = copies_bE / copies_bE.sum(1, keepdim=True).clamp(min=1.0)
        weighted = (shares * scores_bE).view(self.build.num_models, -1)
        return self.model.num_experts * weighted.sum(1)


def _chosen(scores_TE: Tensor, experts: Tensor, real_T: Tensor | None) -> Tensor:
    """[T, E]: 1 where a token that is not padding is routed to an expert, else 0."""
    chosen = torch.zeros_like(scores_TE).scatter_(1, experts, 1.0)
    return chosen if real_T is None else chosen.mul_(real_T[:, None])


class _WithLoss(torch.autograd.Function):
    """Returns x; its backward also starts that of a loss [models]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Scale) -> Tensor:
        ctx.scale, ctx.of_loss = scale, (loss.shape, loss.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, dtype = ctx.of_loss
        return grad, grad.new_ones(shape, dtype=dtype) * ctx.scale, None
