"""Gives the facts of a workload's exchange between replicas."""

from math import prod

from mtcli.core.exchange.facts import ExchangeFacts, ReplicaShare
from mtcli.core.exchange.methods import exchange_facts
from mtcli.core.mesh.sharding import owner_axes
from mtcli.core.plan.elements import trained_of_rank
from mtcli.core.plan.workload import Workload


def exchange_of(work: Workload, pp_rank: int) -> ExchangeFacts:
    """States the exchange of the ranks of a pipeline rank."""
    share = ReplicaShare(
        sync=work.sync,
        steps=work.steps,
        replicas=work.layout.replicas,
        sizes=owned_sizes(work, pp_rank),
        weight=work.sizes.weight,
        optimizer=work.optimizer,
        num_moments=work.num_moments,
        overlaps=work.overlaps_neighbours,
    )
    return exchange_facts(share)


def owned_sizes(work: Workload, pp_rank: int) -> dict[str, int]:
    """Elements of each parameter that a rank's optimizer updates, as the mean over its owners."""
    sizes = {}
    for _, parameter in trained_of_rank(work, pp_rank):
        axes = owner_axes(parameter, work.layout, work.sequence_parallel) if work.zero else ()
        owners = prod(map(work.layout.size, axes))
        sizes[parameter.name] = prod(parameter.stored_shape(work.layout)) // owners
    return sizes
