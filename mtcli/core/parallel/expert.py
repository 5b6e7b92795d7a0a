"""Expert parallelism: sends tokens to the ranks of their experts, and results back.

The expert grid is edp x ep x etp over the same ranks as the attention grid (MoE Parallel Folding,
arXiv:2504.14960, section 3): a rank's own tokens are simply its tokens, whatever axes shard them.
T local tokens of D, k experts of each, N copies of tokens, E experts of which E/ep are local.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mtcli.core.parallel.collectives import (
    all_gather,
    all_gather_v,
    all_to_all_v,
    gather_in,
    reduce_scatter_v,
    scatter_out,
)
from mtcli.core.parallel.groups import Groups
from mtcli.kernels.permute import permute, reorder, sort_copies, unpermute


class Routing(NamedTuple):
    """Where each token goes: `weights` and `experts` are [T, k]; dropped copies are not kept."""

    weights: Tensor
    experts: Tensor
    kept: Tensor  # [T, k] bool
    num_experts: int


class Experts(Protocol):
    """The local experts: rows [N, D] sorted by expert, and how many each has, to [N, D]."""

    def __call__(self, x_ND: Tensor, counts: list[int]) -> Tensor:
        """Partial sums over etp, which shards the experts' width."""


def dispatch(
    name: str, x_TD: Tensor, routing: Routing, experts: Experts, groups: Groups, capacity: int
) -> Tensor:
    """sum over k of weight * expert(x) for each token: [T, D] -> [T, D].

    With a `capacity` above 0 every expert of every rank gets exactly that many rows, the missing
    ones zero. Both dispatchers give the same result.
    """
    kind = {"all_to_all": _all_to_all, "all_gather": _all_gather}[name]
    return kind(x_TD, routing, experts, groups, capacity)


def _all_to_all(
    x_TD: Tensor, routing: Routing, experts: Experts, groups: Groups, capacity: int
) -> Tensor:
    """Sends each copy to its expert's ranks: all-to-all over ep, all-gather over etp."""
    ep, etp = groups.axes["ep"], groups.axes["etp"]
    copies = sort_copies(x_TD, routing.experts, routing.kept, routing.num_experts, capacity)
    # rows of every rank of this expert group, on the host: [ep, etp, ep of the expert, E/ep]
    everyone = all_gather(copies.rows[None], groups.axes["experts"]).cpu()
    table = everyone.view(ep.size, etp.size, ep.size, routing.num_experts // ep.size)
    sent = table[ep.rank, etp.rank].sum(-1).tolist()
    here = table[:, :, ep.rank]  # what arrives at this ep rank: [ep sender, etp sender, E/ep]
    received = here[:, etp.rank].sum(-1).tolist()
    shared = here.sum((0, 2)).tolist()
    segments = here.transpose(0, 1)  # rows lie by (etp sender, ep sender, expert)
    order, back = _by_expert(segments, x_TD.device)
    rows = all_to_all_v(permute(x_TD, copies, sum(sent)), sent, received, ep)
    rows = reorder(all_gather_v(rows, shared, etp), order)
    results = reorder(experts(rows, segments.sum((0, 1)).tolist()), back)
    results = all_to_all_v(reduce_scatter_v(results, shared, etp), received, sent, ep)
    return unpermute(results, routing.weights, copies)


def _all_gather(
    x_TD: Tensor, routing: Routing, experts: Experts, groups: Groups, capacity: int
) -> Tensor:
    """All-gathers the tokens of the expert group; each rank computes its own experts' part."""
    axis, ep = groups.axes["experts"], groups.axes["ep"]
    per_rank = routing.num_experts // ep.size
    x_all = gather_in(x_TD, axis)
    local = all_gather(routing.experts, axis) - ep.rank * per_rank
    kept = all_gather(routing.kept.to(torch.uint8), axis).bool()
    mine = kept & (local >= 0) & (local < per_rank)
    weights = gather_in(routing.weights, axis)
    copies = sort_copies(x_all, local, mine, per_rank, capacity * axis.size)
    counts = copies.rows.tolist()
    results = experts(permute(x_all, copies, sum(counts)), counts)
    return scatter_out(unpermute(results, weights, copies), axis)


def _by_expert(segments: Tensor, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """What sorts rows lying by (sender, sender, expert) stably by expert, and what undoes it.

    None where there is one sender, whose rows are sorted.
    """
    if segments[..., 0].numel() == 1:
        return None, None
    experts = torch.arange(segments.shape[-1]).expand(segments.shape).flatten()
    labels = torch.repeat_interleave(experts, segments.flatten())
    order = torch.argsort(labels, stable=True).to(device)
    return order, torch.argsort(order)
