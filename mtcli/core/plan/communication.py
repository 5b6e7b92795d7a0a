"""Seconds of collectives and p2p between GPUs, by axis.

A collective's time is its bytes over the slowest link it crosses, plus a latency per step: of a
ring for gathers and scatters, of a ring or a tree for all-reduces, of pairs for all-to-alls.
Ranks that share a node and a group share the node's network links too, so a group with k members
in every node reaches k times the network's rate per GPU, as far as the fast link allows.
"""

from functools import singledispatch
from math import ceil, log2

from mtcli.core.plan import traffic
from mtcli.core.plan.exchange.arithmetic import moved_bytes
from mtcli.core.plan.exchange.methods import exchange_of
from mtcli.core.plan.gpu_time import Physics
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.traffic import HOPS, PassTransfers, Transfer
from mtcli.core.plan.workload import Pass, Workload


def group_bandwidth(size: int, stride: int, device: Device, physics: Physics) -> float:
    """Bytes/s per rank that a group whose members are `stride` ranks apart reaches."""
    inside = _together(size, stride, device)
    near = device.link.bandwidth * physics.link
    if inside == size:
        return near
    return min(near, inside * device.network.bandwidth * physics.network)


def _together(size: int, stride: int, device: Device) -> int:
    """Members of a group that share a node."""
    return max(1, min(size, device.node_size // max(1, stride)))


def _ring_latency(size: int, stride: int, device: Device) -> float:
    """Latency of a ring, of whose steps one per further node crosses the network."""
    far = ceil(size / _together(size, stride, device)) - 1
    return far * device.network.latency + (size - 1 - far) * device.link.latency


def _tree_latency(size: int, stride: int, device: Device) -> float:
    """Latency of a tree: up over the nodes, and inside each."""
    inside = _together(size, stride, device)
    return log2(size / inside) * device.network.latency + log2(inside) * device.link.latency


def ring_seconds(moved: float, size: int, stride: int, device: Device, physics: Physics) -> float:
    """Seconds of an all-gather or reduce-scatter whose global tensor has `moved` bytes."""
    if size == 1:
        return 0.0
    bandwidth = group_bandwidth(size, stride, device, physics)
    return moved * (size - 1) / size / bandwidth + _ring_latency(size, stride, device)


def all_reduce_seconds(
    moved: float, size: int, stride: int, device: Device, physics: Physics
) -> float:
    """Seconds of an all-reduce: the quicker of a ring, which scatters and gathers, and of a double
    binary tree, up and down, which carries more bytes over fewer steps (as NCCL chooses)."""
    if size == 1:
        return 0.0
    ring = 2 * ring_seconds(moved, size, stride, device, physics)
    bandwidth = group_bandwidth(size, stride, device, physics)
    return min(ring, 2 * moved / bandwidth + 2 * _tree_latency(size, stride, device))


def collective_seconds(
    sent: Transfer, device: Device, physics: Physics, crossing: float = 1.0
) -> float:
    """Seconds of collectives; `crossing` is the share of an all-to-all's bytes for other nodes that
    cross the network."""
    kind, moved, size, stride, times = sent
    if size == 1:
        return 0.0
    if kind in HOPS:
        latency = _ring_latency(size, stride, device) / (size - 1)
        return times * (moved / group_bandwidth(size, stride, device, physics) + latency)
    if kind == "all_to_all":
        return times * _all_to_all(moved, size, stride, device, physics, crossing)
    timed = all_reduce_seconds if kind == "all_reduce" else ring_seconds
    return times * timed(moved, size, stride, device, physics)


def passes(traffic: PassTransfers, device: Device, physics: Physics, crossing: float = 1.0) -> Pass:
    """Seconds of both ways of traffic."""
    return Pass(
        *(sum(collective_seconds(c, device, physics, crossing) for c in way) for way in traffic)
    )


def _all_to_all(
    moved: float, size: int, stride: int, device: Device, physics: Physics, crossing: float
) -> float:
    """Seconds of an all-to-all of 1/size of the tensor per pair, over the network between nodes."""
    inside = _together(size, stride, device)
    near = moved * (inside - 1) / size / (device.link.bandwidth * physics.link)
    far = moved * (size - inside) / size / (device.network.bandwidth * physics.network)
    steps = (inside - 1) * device.link.latency + (size - inside) * device.network.latency
    return max(near, far * crossing) + steps


@singledispatch  # `published/software.py` has the paper's grids
def tensor_parallel(work: Workload, device: Device, physics: Physics) -> Pass:
    """Seconds of a block's collectives over tp."""
    return passes(traffic.tensor_parallel(work), device, physics)


def context_parallel(work: Workload, device: Device, physics: Physics) -> Pass:
    """Seconds of a block's keys and values, and of their gradients."""
    return passes(traffic.context_parallel(work), device, physics)


def expert_parallel(work: Workload, device: Device, physics: Physics) -> Pass:
    """Seconds of a block's dispatch and combine over ep, and their gather and scatter over etp."""
    if not work.model.num_experts:
        return Pass()
    nodes = work.layout.ep / _together(work.layout.ep, work.layout.etp, device)
    return passes(traffic.expert_parallel(work), device, physics, crossing_share(work, nodes))


@singledispatch
def crossing_share(work: Workload, nodes: float) -> float:
    """Share of the token copies for other nodes' experts that cross the network: all."""
    return 1.0


def exchange_seconds(work: Workload, pp_rank: int, device: Device, physics: Physics) -> float:
    """Mean seconds per step of what a rank sends to other replicas, after its update, and of the
    arithmetic for it."""
    exchange = traffic.replica_exchange(work, pp_rank, tree=False)
    if not exchange:
        return 0.0
    moved = moved_bytes(exchange_of(work, pp_rank).arithmetic())
    crossing = sum(collective_seconds(c, device, physics) for c in exchange)
    return crossing + moved / (device.memory_bandwidth * physics.memory)
