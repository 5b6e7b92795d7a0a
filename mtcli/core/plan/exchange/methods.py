"""The costs of a run's exchange between replicas, by the method of [sync]."""

from collections.abc import Callable
from math import prod

from mtcli.core.config.sync import DECENTRALIZED, PERIODIC
from mtcli.core.mesh.sharding import owner_axes
from mtcli.core.plan.elements import trained_of_rank
from mtcli.core.plan.exchange.decentralized import DecentralizedCosts
from mtcli.core.plan.exchange.diloco import DiLoCoCosts
from mtcli.core.plan.exchange.leaders import EasgdCosts, LsgdCosts
from mtcli.core.plan.exchange.onebit import OneBitCosts
from mtcli.core.plan.exchange.share import ExchangeCosts, ReplicaShare
from mtcli.core.plan.workload import Workload

METHODS: dict[str, Callable[[ReplicaShare], ExchangeCosts]] = {
    "onebit": OneBitCosts,
    "lsgd": LsgdCosts,
    "easgd": EasgdCosts,
    **dict.fromkeys(PERIODIC, DiLoCoCosts),
    **dict.fromkeys(DECENTRALIZED, DecentralizedCosts),
}


def exchange_of(work: Workload, pp_rank: int) -> ExchangeCosts:
    """Chooses the costs of the exchange for the ranks of a pipeline rank."""
    if work.layout.replicas == 1 and work.sync.method != "onebit":
        return ExchangeCosts()
    share = ReplicaShare(
        sync=work.sync,
        steps=work.steps,
        replicas=work.layout.replicas,
        sizes=owned_sizes(work, pp_rank),
        weight=work.sizes.weight,
        master=work.sizes.master or work.sizes.weight,
        optimizer=work.optimizer,
        num_moments=work.num_moments,
        overlaps=work.overlaps_neighbours,
    )
    return METHODS[work.sync.method](share)


def owned_sizes(work: Workload, pp_rank: int) -> dict[str, int]:
    """Elements of each parameter that a rank's optimizer updates, as the mean over its owners."""
    sizes = {}
    for _, parameter in trained_of_rank(work, pp_rank):
        axes = owner_axes(parameter, work.layout, work.sequence_parallel) if work.zero else ()
        owners = prod(map(work.layout.size, axes))
        sizes[parameter.name] = prod(parameter.stored_shape(work.layout)) // owners
    return sizes
