"""Bytes and seconds of collectives and p2p, by axis.

A collective's time is its bytes over the slowest link it crosses, plus a latency per step: of a
ring for gathers and scatters, of a ring or a tree for all-reduces, of pairs for all-to-alls.
Ranks that share a node and a group share the node's network links too, so a group with k members
in every node reaches k times the network's rate per GPU, as far as the fast link allows.
"""

from collections.abc import Iterator
from functools import singledispatch
from math import ceil, log2

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan.elements import RankElements
from mtcli.core.plan.exchange.arithmetic import moved_bytes
from mtcli.core.plan.exchange.methods import exchange_of
from mtcli.core.plan.gpu_time import Physics, dense_gemms
from mtcli.core.plan.grid import grid_traffic
from mtcli.core.plan.hardware import Device
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


def tensor_parallel(work: Workload, device: Device, physics: Physics) -> Pass:
    """Seconds of a block's collectives over tp: with sequence parallelism two all-gathers and two
    reduce-scatters each way, else two all-reduces, which move as much (arXiv:2205.05198, section
    4.2.2). Ranks that share a key-value head exchange columns of it and of its query heads."""
    if work.layout.tp_rows > 1:
        return grid_seconds(work, device, physics)
    moved, tp = work.stream_bytes, work.layout.tp
    way = 2 * ring_seconds(moved, tp, 1, device, physics)
    once = way if work.sequence_parallel else all_reduce_seconds(moved, tp, 1, device, physics)
    exchange = ring_seconds(work.head_bytes, work.kv_sharers, 1, device, physics)
    both = once * work.sharded_halves + exchange
    return Pass(both, both)


@singledispatch  # `published/software.py` has the paper's
def grid_seconds(work: Workload, device: Device, physics: Physics) -> Pass:
    """Seconds of a block's collectives on a grid of tp ranks, ranks of a row side by side. None is
    counted as hidden behind GEMMs, though panels travel while others are multiplied."""
    layout, traffic = work.layout, grid_traffic(work)
    along = group_bandwidth(layout.tp_columns, 1, device, physics)
    down = group_bandwidth(layout.tp_rows, layout.tp_columns, device, physics)
    far = layout.tp > device.node_size
    latency = (device.network if far else device.link).latency
    steps = 2 * work.panels * len(dense_gemms(work)) * latency
    forward, backward = (way.along / along + way.down / down for way in traffic)
    return Pass(forward + steps, backward + 2 * steps)


def context_parallel(work: Workload, device: Device, physics: Physics) -> Pass:
    """Seconds of a block's ring: keys and values, and in the backward pass their gradients too."""
    m, layout = work.model, work.layout
    per_token = 2 * work.kv_heads * m.head_dim / layout.tp * work.sizes.weight
    moved = work.tokens * layout.cp * per_token
    once = ring_seconds(moved, layout.cp, layout.tp, device, physics)
    return Pass(once, 2 * once)


def expert_parallel(work: Workload, device: Device, physics: Physics) -> Pass:
    """Seconds of a block's dispatch and combine over ep, and their gather and scatter over etp."""
    if not work.model.num_experts:
        return Pass()
    routed, etp = work.routed_bytes, work.layout.etp  # after the gather
    gather = 2 * ring_seconds(routed, etp, 1, device, physics)
    both = gather + 2 * _all_to_all(routed / etp, work, device, physics)
    return Pass(both, both)


def _all_to_all(moved: float, work: Workload, device: Device, physics: Physics) -> float:
    """Seconds of an all-to-all of 1/ep of the tensor per pair, over the network between nodes."""
    ep, stride = work.layout.ep, work.layout.etp
    if ep == 1:
        return 0.0
    inside = _together(ep, stride, device)
    near = moved * (inside - 1) / ep / (device.link.bandwidth * physics.link)
    far = moved * (ep - inside) / ep / (device.network.bandwidth * physics.network)
    steps = (inside - 1) * device.link.latency + (ep - inside) * device.network.latency
    return max(near, far * crossing_share(work, ep / inside)) + steps


@singledispatch
def crossing_share(work: Workload, nodes: float) -> float:
    """Share of the token copies for other nodes' experts that cross the network: all."""
    return 1.0


def p2p_seconds(work: Workload, device: Device, physics: Physics) -> float:
    """Seconds of sending a stage's output to the next rank, each tp rank its own shard."""
    layout = work.layout
    if layout.pp == 1:
        return 0.0
    moved = work.stream_bytes / layout.tp
    near = layout.world // layout.pp < device.node_size
    share = physics.link if near else physics.network
    crossed = device.link if near else device.network
    return moved / (crossed.bandwidth * share) + crossed.latency


def gradient_seconds(
    elements: RankElements, work: Workload, device: Device, physics: Physics
) -> Pass:
    """Seconds of reducing a rank's gradients over its data axes, (attention, expert) elements,
    after the backward pass; with zero=1 also of all-gathering weights, before the next forward
    pass.

    An all-reduce in the gradients' width; with zero=1 a reduce-scatter, and the gather in the
    weights'. ZeRO-3's traffic is per block: `sharded_block`.
    """
    total = Pass()
    for count, ranks, stride in data_groups(elements, work.layout):
        there, back = float(count * work.gradient_width), float(count * work.sizes.weight)
        if work.zero:
            total += Pass(
                ring_seconds(back, ranks, stride, device, physics),
                ring_seconds(there, ranks, stride, device, physics),
            )
        else:
            total += Pass(0.0, all_reduce_seconds(there, ranks, stride, device, physics))
    return total


def exchange_seconds(work: Workload, pp_rank: int, device: Device, physics: Physics) -> float:
    """Mean seconds per step of what a rank sends to other replicas, after its update, and of the
    arithmetic for it."""
    replicas = work.layout.replicas
    if replicas == 1:
        return 0.0
    stride = work.layout.tp * work.layout.cp * work.layout.dp
    exchange = exchange_of(work, pp_rank)
    sent, moved = exchange.busiest_bytes(tree=False), moved_bytes(exchange.arithmetic())
    crossing = ring_seconds(sent * replicas / (replicas - 1), replicas, stride, device, physics)
    return crossing + moved / (device.memory_bandwidth * physics.memory)


def sharded_block(elements: RankElements, work: Workload, device: Device, physics: Physics) -> Pass:
    """Seconds of a block's ZeRO-3: weights gathered for both passes, gradients reduce-scattered."""
    if work.zero != 3:
        return Pass()
    gather = sum(
        ring_seconds(float(count * work.sizes.weight), ranks, stride, device, physics)
        for count, ranks, stride in data_groups(elements, work.layout)
    )
    return Pass(gather, 2 * gather)


def data_groups(elements: RankElements, layout: ParallelLayout) -> Iterator[tuple[int, int, int]]:
    """Yields (elements, ranks that reduce them, their stride): attention's, then experts'."""
    if elements.attention:
        yield elements.attention, layout.dp * layout.cp, layout.tp
    if elements.experts:
        yield elements.experts, layout.edp, layout.ep * layout.etp
