"""Expert parallelism: sends tokens to the ranks of their experts, and results back.

The expert grid edp x ep x etp folds the same ranks as the attention grid (MoE Parallel Folding,
arXiv:2504.14960, section 3): it takes a rank's tokens whatever axes shard them. T local tokens of
D, k experts per token, N copies of tokens, E experts of which E/ep are local.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mtcli.core.parallel.collectives import (
    all_gather,
    all_gather_v,
    gather_in,
    reduce_scatter_v,
    scatter_out,
    start_exchange,
)
from mtcli.core.parallel.device_read import start_read
from mtcli.core.parallel.groups import Groups
from mtcli.kernels.permute import (
    permute,
    reorder,
    sort_copies,
    unpermute,
)


class Routing(NamedTuple):
    """The router's choice: `weights` and `experts` [T, k], and which copies are not dropped."""

    weights: Tensor
    experts: Tensor
    kept: Tensor | None  # [T, k] bool; None where none is dropped
    num_experts: int


class Experts(Protocol):
    """The local experts' computation: rows [N, D], sorted by expert, to [N, D].

    `counts_E` are the rows of each expert, on the rows' device; None where all have equally many.
    """

    def __call__(self, x_ND: Tensor, counts_E: Tensor | None) -> Tensor:
        """Returns partial sums over etp, which shards the experts' inner width."""


class Dispatch:
    """The sum over k of weight * expert(x) for each token, [T, D] -> [T, D], in steps.

    Ranks tell each other how many rows they send, then send them, then compute and send results
    back. What the caller computes before the first `advance`, a GPU works on while the host waits
    for the numbers; what it computes after one, travels beside rows, and its backward beside their
    gradients. With a `capacity` above 0 there is no wait: every expert gets exactly `capacity` rows
    of every rank, padded with zeros, which are sent at once. Both dispatchers give the same result.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        x_TD: Tensor,
        routing: Routing,
        experts: Experts,
        groups: Groups,
        capacity: int,
    ) -> None:
        self.x_TD, self.routing, self.experts = x_TD, routing, experts
        self.groups, self.capacity = groups, capacity
        self.tokens: Callable[[], Tensor] | None = None  # waits for them
        self.results: Callable[[], Tensor] | None = None
        # One rank keeps its tokens, and the way without sizes asks a GPU for none.
        self.gathers = name == "all_gather" or groups.axes["experts"].size == 1
        if self.gathers:
            return
        number = routing.num_experts
        self.copies = sort_copies(x_TD, routing.experts, routing.kept, number, capacity)
        if capacity:
            self.everyone = self.copies.rows.expand(groups.axes["experts"].size, -1)
            self.read: Callable[[], Tensor] = partial(torch.full, self.everyone.shape, capacity)
            self.advance()
        else:
            self.everyone = all_gather(self.copies.counts[None], groups.axes["experts"])
            self.read = start_read(self.everyone)

    def advance(self) -> None:
        """Sends this rank's tokens to their experts; where they are sent, results back."""
        if self.gathers:
            return
        if self.tokens is None:
            self.tokens = self._send()
        elif self.results is None:
            self.results = self._compute(self.tokens())

    def finish(self) -> Tensor:
        """Returns the weighted sums of the experts' results."""
        if self.gathers:
            return _all_gather(self.x_TD, self.routing, self.experts, self.groups, self.capacity)
        while self.results is None:
            self.advance()
        return unpermute(self.results(), self.routing.weights, self.copies)

    def _send(self) -> Callable[[], Tensor]:
        """Starts to send each copy to its expert's ranks, once the host knows how many there
        are."""
        ep, etp = self.groups.axes["ep"], self.groups.axes["etp"]
        table = self.read().view(self._shape)
        sent = table[ep.rank, etp.rank].sum(-1).tolist()
        arriving = table[:, :, ep.rank]  # what arrives at this ep rank: [ep sender, etp, E/ep]
        received = arriving[:, etp.rank].sum(-1).tolist()
        self.sizes = sent, received, arriving.sum((0, 2)).tolist()
        return start_exchange(permute(self.x_TD, self.copies, sum(sent)), sent, received, ep)

    def _compute(self, rows: Tensor) -> Callable[[], Tensor]:
        """Computes this rank's experts, and starts to send results to the tokens' ranks."""
        ep, etp = self.groups.axes["ep"], self.groups.axes["etp"]
        sent, received, shared = self.sizes
        # Rows lie by (etp sender, ep sender, expert).
        segments = self.everyone.view(self._shape)[:, :, ep.rank].transpose(0, 1).flatten(0, 1)
        order, back = _by_expert(segments, sum(shared))
        rows = reorder(all_gather_v(rows, shared, etp), order)
        counts = None if self.capacity else segments.sum(0)
        results = reduce_scatter_v(reorder(self.experts(rows, counts), back), shared, etp)
        return start_exchange(results, received, sent, ep)

    @property
    def _shape(self) -> tuple[int, ...]:
        """Of the rows of every rank of this expert group: [ep, etp, ep of the expert, E/ep]."""
        ep, etp = self.groups.axes["ep"], self.groups.axes["etp"]
        return ep.size, etp.size, ep.size, self.routing.num_experts // ep.size


def _all_gather(
    x_TD: Tensor, routing: Routing, experts: Experts, groups: Groups, capacity: int
) -> Tensor:
    """All-gathers the tokens of the expert group; each rank computes its experts' share."""
    axis, ep = groups.axes["experts"], groups.axes["ep"]
    per_rank = routing.num_experts // ep.size
    x_all = gather_in(x_TD, axis)
    local = all_gather(routing.experts, axis) - ep.rank * per_rank
    is_kept = routing.kept
    if is_kept is not None:
        is_kept = all_gather(is_kept.to(torch.uint8), axis).bool()
    if ep.size > 1:
        is_local = (local >= 0) & (local < per_rank)
        is_kept = is_local if is_kept is None else is_kept & is_local
    weights = gather_in(routing.weights, axis)
    copies = sort_copies(x_all, local, is_kept, per_rank, capacity * axis.size)
    rows = permute(x_all, copies, copies.num_rows)
    results = experts(rows, None if capacity else copies.counts)
    return scatter_out(unpermute(results, weights, copies), axis)


def _by_expert(segments_SE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(the order that sorts rows from (sender, expert) to expert, its inverse).

    All rows of a segment, those of one sender and expert, move by the same distance.
    """

    def first_rows(sizes: Tensor) -> Tensor:
        return sizes.flatten().cumsum(0).view(sizes.shape) - sizes

    shift_SE = first_rows(segments_SE.T).T - first_rows(segments_SE)
    row = torch.arange(rows, device=segments_SE.device)

    def spread(shifts: Tensor, sizes: Tensor) -> Tensor:
        return torch.repeat_interleave(shifts.flatten(), sizes.flatten(), output_size=rows)

    return row - spread(shift_SE.T, segments_SE.T), row + spread(shift_SE, segments_SE)
