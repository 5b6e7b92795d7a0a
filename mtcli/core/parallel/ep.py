"""Expert parallelism: takes tokens to the ranks that hold their experts, and brings results back.

The expert grid is edp x ep x etp over the same ranks as the attention grid (MoE Parallel Folding,
arXiv:2504.14960, section 3): a rank's own tokens are simply its tokens, whatever axes cut them.
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


class Routing(NamedTuple):
    """Where each token goes: `weights` and `experts` are [T, k]; dropped copies are not kept."""

    weights: Tensor
    experts: Tensor
    kept: Tensor  # [T, k] bool
    num_experts: int


class Experts(Protocol):
    """The local experts: rows [N, D] sorted by expert, and how many each has, to [N, D]."""

    def __call__(self, x_ND: Tensor, counts: list[int]) -> Tensor:
        """Partial sums over etp, where the experts' width is cut."""


class Copies(NamedTuple):
    """Copies of tokens sorted by expert: `token` and `slot` index [T, k], `counts` is [E]."""

    token: Tensor
    slot: Tensor
    counts: Tensor


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
    """Each copy travels to its expert's ranks: all-to-all over ep, all-gather over etp."""
    ep, etp = groups.axes["ep"], groups.axes["etp"]
    copies = sort_by_expert(routing)
    rows, counts = _pad(x_TD[copies.token], copies.counts, capacity)
    # counts of every rank of this expert group, on the host: [ep, etp, ep of the expert, E/ep]
    everyone = all_gather(counts[None], groups.axes["experts"]).cpu()
    table = everyone.view(ep.size, etp.size, ep.size, routing.num_experts // ep.size)
    sent = table[ep.rank, etp.rank].sum(-1).tolist()
    here = table[:, :, ep.rank]  # what arrives at this ep rank: [ep sender, etp sender, E/ep]
    received = here[:, etp.rank].sum(-1).tolist()
    shared = here.sum((0, 2)).tolist()
    rows = all_gather_v(all_to_all_v(rows, sent, received, ep), shared, etp)
    segments = here.transpose(0, 1)  # rows lie by (etp sender, ep sender, expert)
    order = _by_expert(segments, rows.device)
    results = experts(rows[order], segments.sum((0, 1)).tolist())
    results = results[torch.argsort(order)]
    results = all_to_all_v(reduce_scatter_v(results, shared, etp), received, sent, ep)
    results = _unpad(results, copies.counts, capacity)
    return _combine(results, x_TD, routing, copies)


def _all_gather(
    x_TD: Tensor, routing: Routing, experts: Experts, groups: Groups, capacity: int
) -> Tensor:
    """Every rank sees the tokens of its whole expert group and computes its own experts' part."""
    axis, ep = groups.axes["experts"], groups.axes["ep"]
    per_rank = routing.num_experts // ep.size
    x_all = gather_in(x_TD, axis)
    local = all_gather(routing.experts, axis) - ep.rank * per_rank
    kept = all_gather(routing.kept.to(torch.uint8), axis).bool()
    mine = kept & (local >= 0) & (local < per_rank)
    everyone = Routing(gather_in(routing.weights, axis), local, mine, per_rank)
    copies = sort_by_expert(everyone)
    rows, counts = _pad(x_all[copies.token], copies.counts, capacity * axis.size)
    results = experts(rows, counts.tolist())
    results = _unpad(results, copies.counts, capacity * axis.size)
    return scatter_out(_combine(results, x_all, everyone, copies), axis)


def sort_by_expert(routing: Routing) -> Copies:
    """The kept copies in the order of their experts, and of their tokens within an expert."""
    k, num_experts = routing.experts.shape[1], routing.num_experts
    flat = routing.experts.masked_fill(~routing.kept, num_experts).flatten()
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    order = torch.argsort(flat, stable=True)[: int(counts.sum())]
    return Copies(order // k, order % k, counts)


def _combine(results_ND: Tensor, x_TD: Tensor, routing: Routing, copies: Copies) -> Tensor:
    weights = routing.weights[copies.token, copies.slot].to(results_ND.dtype)
    empty = torch.zeros_like(x_TD)
    return empty.index_add(0, copies.token, results_ND * weights[:, None])


def _by_expert(segments: Tensor, device: torch.device) -> Tensor:
    """The order that sorts rows lying by (sender, sender, expert) stably by expert."""
    experts = torch.arange(segments.shape[-1]).expand(segments.shape).flatten()
    labels = torch.repeat_interleave(experts, segments.flatten())
    return torch.argsort(labels, stable=True).to(device)


def _pad(rows: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Every expert's rows filled up with zeros to `capacity`; unchanged where it is 0."""
    if not capacity:
        return rows, counts
    at = _padded_places(counts, capacity)
    padded = rows.new_zeros(len(counts) * capacity, rows.shape[1]).index_copy(0, at, rows)
    return padded, torch.full_like(counts, capacity)


def _unpad(rows: Tensor, counts: Tensor, capacity: int) -> Tensor:
    return rows[_padded_places(counts, capacity)] if capacity else rows


def _padded_places(counts: Tensor, capacity: int) -> Tensor:
    assert int(counts.max()) <= capacity, f"{int(counts.max())} rows in a capacity of {capacity}"
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    within = torch.arange(int(counts.sum()), device=counts.device) - starts
    experts = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    return experts * capacity + within
