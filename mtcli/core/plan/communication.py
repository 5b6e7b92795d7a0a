"""Seconds of collectives and p2p between ranks, by axis.

Between GPUs a collective's time is its bytes over the slowest link it crosses, plus a latency per
step: of a ring for gathers and scatters, of a ring or a tree for all-reduces, of pairs for
all-to-alls. Ranks that share a node and a group share the node's network links too, so a group with
k members in every node reaches k times the network's rate per GPU, as far as the fast link allows.
The processes of a CPU share its memory, and are a node of as many ranks.
"""

from collections.abc import Iterable
from functools import singledispatch
from math import ceil, log2

from mtcli.core.exchange.arithmetic import BYTES, Arithmetic
from mtcli.core.plan import traffic
from mtcli.core.plan.costs import Pass
from mtcli.core.plan.exchange import exchange_of
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.traffic import HOPS, PassTransfers, Transfer
from mtcli.core.plan.workload import Workload


def group_bandwidth(size: int, stride: int, device: Device) -> float:
    """Bytes/s per rank of a group whose members are `stride` ranks apart."""
    inside = _together(size, stride, device)
    if inside == size:
        return device.reached_link
    return min(device.reached_link, inside * device.reached_network)


def _together(size: int, stride: int, device: Device) -> int:
    """The members of a group that share a node."""
    return max(1, min(size, device.node_size // max(1, stride)))


def _ring_latency(size: int, stride: int, device: Device) -> float:
    """The latency of a ring; one step per further node crosses the network."""
    far = ceil(size / _together(size, stride, device)) - 1
    return far * device.network.latency + (size - 1 - far) * device.link.latency


def _tree_latency(size: int, stride: int, device: Device) -> float:
    """Latency of a tree: up over the nodes, and inside each."""
    inside = _together(size, stride, device)
    return log2(size / inside) * device.network.latency + log2(inside) * device.link.latency


def ring_seconds(moved: float, size: int, stride: int, device: Device) -> float:
    """Seconds of an all-gather or reduce-scatter whose global tensor has `moved` bytes."""
    sent = moved * (size - 1) / size
    return sent / group_bandwidth(size, stride, device) + _ring_latency(size, stride, device)


def all_reduce_seconds(moved: float, size: int, stride: int, device: Device) -> float:
    """Seconds of an all-reduce: the quicker of a ring (reduce-scatter and all-gather) and a double
    binary tree (up and down), which moves more bytes in fewer steps, as NCCL chooses."""
    ring = 2 * ring_seconds(moved, size, stride, device)
    bandwidth = group_bandwidth(size, stride, device)
    return min(ring, 2 * moved / bandwidth + 2 * _tree_latency(size, stride, device))


def _all_to_all(moved: float, size: int, stride: int, device: Device, crossing: float) -> float:
    """Seconds of an all-to-all of 1/size of the tensor per pair, over the network between nodes."""
    inside = _together(size, stride, device)
    near = moved * (inside - 1) / size / device.reached_link
    far = moved * (size - inside) / size / device.reached_network
    steps = (inside - 1) * device.link.latency + (size - inside) * device.network.latency
    return max(near, far * crossing) + steps


def collective_seconds(sent: Transfer, device: Device, crossing: float = 1.0) -> float:
    """Seconds of a transfer; `crossing` is the share of an all-to-all's bytes for other nodes that
    cross the network."""
    kind, moved, size, stride, times = sent
    if size == 1:
        return 0.0
    if kind in HOPS:
        latency = _ring_latency(size, stride, device) / (size - 1)
        return times * (moved / group_bandwidth(size, stride, device) + latency)
    if kind == "all_to_all":
        return times * _all_to_all(moved, size, stride, device, crossing)
    timed = all_reduce_seconds if kind == "all_reduce" else ring_seconds
    return times * timed(moved, size, stride, device)


def transfer_seconds(sent: Iterable[Transfer], device: Device, crossing: float = 1.0) -> float:
    """Seconds of transfers, one after another."""
    return sum(collective_seconds(transfer, device, crossing) for transfer in sent)


def passes(traffic: PassTransfers, device: Device, crossing: float = 1.0) -> Pass:
    """Seconds of the transfers of a forward and of a backward pass."""
    return Pass(*(transfer_seconds(way, device, crossing) for way in traffic))


def starting_seconds(transfers: PassTransfers, work: Workload, device: Device) -> Pass:
    """Seconds of the host to start the transfers of a forward and of a backward pass. Each waits
    for the host of its slowest rank, which of n ranks is later with log(n)."""
    waited = [
        sum(one.times * log2(2 if one.kind in HOPS else one.size) for one in way if one.size > 1)
        for way in transfers
    ]
    return Pass(*waited) * (device.physics.collective * work.host_share)


@singledispatch  # `benchmarks/published/software.py` has the paper's grids
def tensor_parallel(work: Workload, device: Device) -> Pass:
    """Seconds of a block's collectives over tp."""
    return passes(traffic.tensor_parallel(work), device)


def context_parallel(work: Workload, device: Device) -> Pass:
    """Seconds of exchanging a block's keys and values, and their gradients, over cp."""
    return passes(traffic.context_parallel(work), device)


def expert_parallel(work: Workload, device: Device) -> Pass:
    """Seconds of a block's dispatch and combine over ep, and their gather and scatter over etp."""
    if not work.model.num_experts:
        return Pass()
    nodes = work.layout.ep / _together(work.layout.ep, work.layout.etp, device)
    return passes(traffic.expert_parallel(work), device, work.crossing_share(nodes))


def dispatch_seconds(work: Workload, device: Device) -> float:
    """Seconds of sending token copies to their experts' ranks, one of the all-to-alls over ep."""
    nodes = work.layout.ep / _together(work.layout.ep, work.layout.etp, device)
    (sent,) = (one for one in traffic.expert_parallel(work).forward if one.kind == "all_to_all")
    return collective_seconds(sent._replace(times=1), device, work.crossing_share(nodes))


def exchange_seconds(work: Workload, pp_rank: int, device: Device) -> float:
    """Mean seconds per step of a rank's exchange with other replicas, after its update, and of its
    arithmetic. All-reduces between replicas are trees on CPUs (gloo)."""
    exchange = traffic.replica_exchange(work, pp_rank, tree=device.name == "cpu")
    if not exchange:
        return 0.0
    works = exchange_of(work, pp_rank).arithmetic()
    return transfer_seconds(exchange, device) + arithmetic_seconds(works, device)


def arithmetic_seconds(works: Iterable[Arithmetic], device: Device) -> float:
    """Seconds of arithmetic: its bytes over the memory bandwidth, and the host's calls."""
    rate, call = device.reached_bandwidth, device.physics.call
    return sum(BYTES[kind] * elements / rate + calls * call for kind, elements, calls in works)
