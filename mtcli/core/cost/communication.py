"""Bytes and seconds of what ranks send each other, by axis.

A collective's time is its bytes over the slowest link it crosses, plus a latency per ring step.
Ranks that share a node and a group share the node's network links too, so a group with k members
in every node reaches k times the network's rate per GPU, as far as the fast link allows.
"""

from math import log2

from mtcli.core.cost.hardware import Device
from mtcli.core.cost.kernels import Pass, expert_rows
from mtcli.core.cost.memory import Held
from mtcli.core.cost.physics import Physics
from mtcli.core.cost.workload import Workload


def group_bandwidth(size: int, stride: int, device: Device) -> float:
    """Bytes/s per rank of a group whose members are `stride` ranks apart."""
    inside = max(1, min(size, device.node_size // max(1, stride)))
    if inside == size:
        return device.link_bandwidth
    return min(device.link_bandwidth, inside * device.network_bandwidth)


def ring_seconds(moved: float, size: int, stride: int, device: Device, physics: Physics) -> float:
    """Seconds of an all-gather or reduce-scatter whose whole tensor is `moved` bytes."""
    if size == 1:
        return 0.0
    bandwidth = group_bandwidth(size, stride, device) * physics.link
    return moved * (size - 1) / size / bandwidth + physics.latency * (1 + log2(size))


def tensor_parallel(work: Workload, device: Device, physics: Physics) -> Pass:
    """Per block: with sequence parallelism two all-gathers and two reduce-scatters each way, and
    without it two all-reduces, which move as much (arXiv:2205.05198, section 4.2.2)."""
    m, tp = work.model, work.layout.tp
    moved = float(work.tokens * m.hidden_size * work.sizes.weight)
    dense = not m.num_experts or m.shared_expert_ffn_hidden_size > 0
    once = 2 * ring_seconds(moved, tp, 1, device, physics)
    return Pass(once * (1 + dense), once * (1 + dense))


def context_parallel(work: Workload, device: Device, physics: Physics) -> Pass:
    """Per block: keys and values pass round the ring; in the backward pass their gradients too."""
    m, layout = work.model, work.layout
    per_token = 2 * m.num_kv_heads * m.head_dim / layout.tp * work.sizes.weight
    moved = work.tokens * layout.cp * per_token
    once = ring_seconds(moved, layout.cp, layout.tp, device, physics)
    return Pass(once, 2 * once)


def expert_parallel(work: Workload, device: Device, physics: Physics) -> Pass:
    """Per block: dispatch and combine over ep, and their gather and scatter over etp."""
    m, layout = work.model, work.layout
    if not m.num_experts:
        return Pass()
    routed = expert_rows(work) * m.hidden_size * work.sizes.weight  # bytes, after the gather
    gather = 2 * ring_seconds(routed, layout.etp, 1, device, physics)
    both = gather + 2 * _all_to_all(routed / layout.etp, work, device, physics)
    return Pass(both, both)


def _all_to_all(moved: float, work: Workload, device: Device, physics: Physics) -> float:
    """Every pair of ranks exchanges 1/ep of the tensor: what leaves the node takes the network."""
    ep, stride = work.layout.ep, work.layout.etp
    if ep == 1:
        return 0.0
    inside = max(1, min(ep, device.node_size // max(1, stride)))
    near = moved * (inside - 1) / ep / (device.link_bandwidth * physics.link)
    far = moved * (ep - inside) / ep / (device.network_bandwidth * physics.link)
    return max(near, far) + physics.latency * (1 + log2(ep))


def hop_seconds(work: Workload, device: Device, physics: Physics) -> float:
    """A stage's output to the next rank, each tp rank sending its own part."""
    layout = work.layout
    if layout.pp == 1:
        return 0.0
    moved = work.tokens * work.model.hidden_size * work.sizes.weight / layout.tp
    near = layout.world // layout.pp < device.node_size
    bandwidth = device.link_bandwidth if near else device.network_bandwidth
    return moved / (bandwidth * physics.link) + physics.latency


def gradient_seconds(elements: Held, work: Workload, device: Device, physics: Physics) -> float:
    """Reducing a rank's gradients over its data axes: (attention, expert) elements.

    An all-reduce in the gradients' width; with zero=1 a reduce-scatter, and an all-gather of the
    new weights in theirs. ZeRO-3's traffic is per block: `sharded_block`.
    """
    layout, sizes = work.layout, work.sizes
    back = sizes.weight if work.zero else sizes.gradient
    return sum(
        ring_seconds(float(count * width), ranks, stride, device, physics)
        for count, ranks, stride in (
            (elements.attention, layout.dp * layout.cp, layout.tp),
            (elements.experts, layout.edp, layout.ep * layout.etp),
        )
        for width in (sizes.gradient, back)
        if count
    )


def sharded_block(elements: Held, work: Workload, device: Device, physics: Physics) -> Pass:
    """ZeRO-3, per block: weights gathered for both passes, gradients scattered after the second."""
    if work.zero != 3:
        return Pass()
    layout, sizes = work.layout, work.sizes
    gather = sum(
        ring_seconds(float(count * sizes.weight), ranks, stride, device, physics)
        for count, ranks, stride in (
            (elements.attention, layout.dp * layout.cp, layout.tp),
            (elements.experts, layout.edp, layout.ep * layout.etp),
        )
        if count
    )
    return Pass(gather, 2 * gather)
