"""Counts the bytes that ranks send for data parallelism, as the traffic counter of training does.

A ring of n ranks moves 2 (n-1)/n of a tensor's bytes per rank in an all-reduce, (n-1)/n in a
reduce-scatter and (n-1)/n of the gathered tensor in an all-gather (Patarasuk and Yuan, 2009). The
state, bytes and arithmetic of exchanges between replicas are facts of their method (core/exchange).
"""

from math import prod
from typing import NamedTuple

from mtcli.core.exchange.facts import ExchangeFacts, ReplicaShare
from mtcli.core.exchange.methods import METHODS
from mtcli.core.mesh.sharding import Parameter, owner_axes
from mtcli.core.plan.elements import is_sharded, trained_of_rank
from mtcli.core.plan.workload import Workload


class SentBytes(NamedTuple):
    """Mean bytes that one rank sends in a step."""

    inside: float  # its replica: gradients, and weights that others have updated
    across: float  # to other replicas

    @property
    def total(self) -> float:
        """Bytes sent within a replica and to other replicas."""
        return self.inside + self.across


def sync_bytes_per_step(work: Workload) -> float:
    """Mean bytes per step that all ranks together send for data parallelism."""
    ranks_of_stage = work.layout.world // work.layout.pp
    return ranks_of_stage * sum(rank_sync_bytes(work, rank).total for rank in range(work.layout.pp))


def rank_sync_bytes(work: Workload, pp_rank: int) -> SentBytes:
    """Mean bytes per step that one rank of a pipeline rank sends."""
    last = work.layout.num_stages - 1
    inside = 0.0
    for stage, parameter in trained_of_rank(work, pp_rank):
        # FSDP2 gathers weights for both passes of a micro-batch; those of the first stage's ends
        # stay until the backward, where no head reads them.
        stays = parameter.layer == "first" and stage != last
        inside += _inside(parameter, work, gathers=1 if stays else 2)
    return SentBytes(inside, exchange_of(work, pp_rank).sent_bytes())


def _inside(parameter: Parameter, work: Workload, gathers: int) -> float:
    """Bytes of reducing a parameter's gradient over the data ranks of a replica; with zero=3 also
    of `gathers` all-gathers of its weights per micro-batch."""
    layout, sizes = work.layout, work.sizes
    if layout.dp * layout.cp == 1:
        return 0.0
    rows, *columns = parameter.stored_shape(layout)
    elements = float(rows * prod(columns))
    if not work.zero:
        n = prod(map(layout.size, parameter.gradient_axes(layout, work.sequence_parallel)))
        return 2 * (n - 1) / n * elements * sizes.gradient
    n = prod(map(layout.size, owner_axes(parameter, layout, work.sequence_parallel)))
    padded = -(-rows // n) * n * prod(columns)
    if not is_sharded(work):
        return (n - 1) / n * padded * (sizes.gradient + sizes.weight)
    moved = gathers * sizes.weight + sizes.gradient
    return work.num_micro_batches * (n - 1) / n * padded * moved


def exchange_of(work: Workload, pp_rank: int) -> ExchangeFacts:
    """The exchange facts of a rank of pipeline rank `pp_rank`."""
    facts = METHODS[work.sync.method]
    share = ReplicaShare(
        sync=work.sync,
        steps=work.steps,
        replicas=work.layout.replicas,
        # Counting them takes a third of a search, and one replica exchanges nothing.
        sizes={} if facts is ExchangeFacts else owned_sizes(work, pp_rank),
        weight=work.sizes.weight,
        optimizer=work.optimizer,
        overlaps=work.overlaps_neighbours,
    )
    return facts(share)


def owned_sizes(work: Workload, pp_rank: int) -> dict[str, int]:
    """Elements of each parameter that a rank's optimizer updates, as the mean over owners."""
    of_kind: dict[str, int] = {}  # all blocks are alike
    sizes = {}
    for _, parameter in trained_of_rank(work, pp_rank):
        kind = parameter.name.removeprefix(f"blocks.{parameter.layer}.")
        if kind not in of_kind:
            axes = owner_axes(parameter, work.layout, work.sequence_parallel) if work.zero else ()
            owners = prod(map(work.layout.size, axes))
            of_kind[kind] = prod(parameter.stored_shape(work.layout)) // owners
        sizes[parameter.name] = of_kind[kind]
    return sizes
