"""What a rank sends to other replicas, keeps and computes for it, by the method of [sync]."""

from collections.abc import Iterator
from math import prod

from mtcli.core.config.sync import DECENTRALIZED, PERIODIC
from mtcli.core.mesh.sharding import owner_axes
from mtcli.core.mesh.topology import MixingGraph
from mtcli.core.plan.arithmetic import Arithmetic
from mtcli.core.plan.elements import trained_of_rank
from mtcli.core.plan.sync_decentralized import (
    decentralized_arithmetic,
    decentralized_bytes,
    decentralized_state,
)
from mtcli.core.plan.sync_diloco import diloco_arithmetic, diloco_bytes, diloco_state
from mtcli.core.plan.sync_easgd import easgd_arithmetic, easgd_bytes, easgd_state
from mtcli.core.plan.sync_lsgd import lsgd_arithmetic, lsgd_broadcasts, lsgd_bytes, lsgd_state
from mtcli.core.plan.sync_onebit import onebit_arithmetic, onebit_bytes, onebit_state
from mtcli.core.plan.workload import Workload


def exchanged_bytes(work: Workload, pp_rank: int) -> float:
    """Mean bytes per step of a run that a rank of a pipeline rank sends to other replicas."""
    sync, replicas, sizes = work.sync, work.layout.replicas, owned_sizes(work, pp_rank)
    if replicas == 1:
        return 0.0
    elements, master = sum(sizes.values()), work.sizes.master or work.sizes.weight
    run = sync, work.steps, replicas
    if sync.method in PERIODIC:
        return diloco_bytes(*run, sizes, work.sizes.weight)
    if sync.method in DECENTRALIZED:
        return _mixed(work) * decentralized_bytes(sync, replicas, elements, master)
    if sync.method == "onebit":
        return onebit_bytes(*run, elements, work.sizes.weight)
    count = lsgd_bytes if sync.method == "lsgd" else easgd_bytes
    return count(*run, elements, master)


def exchange_arithmetic(work: Workload, pp_rank: int) -> Iterator[Arithmetic]:
    """The mean arithmetic per step of a run that a rank of a pipeline rank does for the exchange
    with other replicas, beyond the optimizer's."""
    sync, replicas, sizes = work.sync, work.layout.replicas, owned_sizes(work, pp_rank)
    if replicas == 1:
        return iter(())
    elements, tensors = sum(sizes.values()), len(sizes)
    if sync.method in PERIODIC:
        return diloco_arithmetic(sync, work.steps, replicas, sizes)
    if sync.method in DECENTRALIZED:
        momentum = work.num_moments > 0
        return decentralized_arithmetic(sync, replicas, elements, tensors, _mixed(work), momentum)
    if sync.method == "onebit":
        return onebit_arithmetic(sync, work.steps, replicas, sizes)
    if sync.method == "lsgd":
        return lsgd_arithmetic(sync, work.steps, replicas, elements, tensors)
    return easgd_arithmetic(sync, work.steps, elements, tensors)


def _mixed(work: Workload) -> int:
    """Tensors that decentralized replicas mix for each parameter: its weights, or momenta too."""
    return 1 + (work.sync.method == "da_dmsgd" and work.num_moments > 0)


def busiest_bytes(work: Workload, pp_rank: int, tree: bool) -> float:
    """Mean bytes per step that leave the replica that sends most: a step takes as long as those.

    The source of a broadcast sends all of it: to the next rank of a ring (NCCL), or, as the root of
    a `tree`, to log2 of them (gloo).
    """
    sync, replicas = work.sync, work.layout.replicas
    most = exchanged_bytes(work, pp_rank)
    if sync.method in DECENTRALIZED and replicas > 1:
        graph = MixingGraph.of(sync, replicas)
        return most / graph.sent_per_replica * graph.most_sent
    if sync.method == "lsgd":
        width = work.sizes.master or work.sizes.weight
        size = sum(owned_sizes(work, pp_rank).values()) * width
        return size * lsgd_broadcasts(sync, work.steps, replicas, tree)
    return most


def exchange_state_bytes(work: Workload, pp_rank: int) -> int:
    """Bytes that a rank keeps for the exchange, besides the optimizer's state."""
    sync, replicas = work.sync, work.layout.replicas
    if replicas == 1:
        return 0
    master = work.sizes.master or work.sizes.weight
    if sync.method in PERIODIC:
        each = diloco_state(sync, work.sizes.weight)
    elif sync.method in DECENTRALIZED:
        each = decentralized_state(sync, replicas, master) * work.overlaps_neighbours
        each *= _mixed(work)
    elif sync.method == "onebit":
        each = onebit_state(work.optimizer, replicas, work.sizes.weight)
    else:
        each = lsgd_state(sync) if sync.method == "lsgd" else easgd_state(sync, master)
    return round(each * sum(owned_sizes(work, pp_rank).values()))


def owned_sizes(work: Workload, pp_rank: int) -> dict[str, int]:
    """Elements of each parameter that a rank's optimizer updates, as the mean over its owners."""
    found = {}
    for _, parameter in trained_of_rank(work, pp_rank):
        axes = owner_axes(parameter, work.layout, work.sequence_parallel) if work.zero else ()
        owners = prod(map(work.layout.size, axes))
        found[parameter.name] = prod(parameter.stored_shape(work.layout)) // owners
    return found
