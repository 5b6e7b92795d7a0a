"""Models the software of published runs where it differs from ours, by the year of their preprint.

What `PublishedWork` overrides, and each function registered here for it, takes the place of plan's
own.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2

from mtcli.core.plan.communication import group_bandwidth, tensor_parallel
from mtcli.core.plan.costs import Pass
from mtcli.core.plan.gpu_time import attention_flops, attention_rate, attention_seconds, dense_gemms
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.physics import BLACKWELL, Physics
from mtcli.core.plan.workload import Workload

# Years and months from which a source's own code may have them.
FUSED_SOFTMAX = 2104  # scale, mask and softmax in one kernel of 16 bits: arXiv:2104.04473, 4.2
FUSED_ACCUMULATION = 2202  # in the GEMM that makes a gradient: Megatron-LM, commit 83b1e42f30
FLASH_ATTENTION = 2206  # arXiv:2205.14135 appeared at the end of the month before
HIDDEN_REDUCTION = 2308  # --overlap-grad-reduce: Megatron-LM, commit 2d5220a424
ONCE_PER_NODE = 2505  # DeepEP and what followed it; arXiv:2504.14960 sends a copy to each expert

FP16_CODE = 2201  # the month that is taken for code of fp16 or fp32 without a preprint

UNFUSED = 1.5  # more traffic where bias, GELU, dropout and addition are kernels of their own


@dataclass(frozen=True)
class PublishedWork(Workload):
    """A published step and its software."""

    flash: bool = True  # attention never writes its scores
    fused: bool = True  # scale, mask and softmax are one kernel
    adds_in_gemm: bool = True  # a GEMM adds the gradient that it makes to those before
    hides_reduction: bool = True  # gradients are reduced behind the last backward pass
    narrow_gradients: bool = False  # gradients are added and reduced in the weights' 16 bits
    once_per_node: bool = False  # a token crosses to another node once for all of its experts there

    @property
    def gradient_width(self) -> int:
        """Bytes per element; of narrow gradients the update makes wide copies."""
        return self.sizes.weight if self.narrow_gradients else self.sizes.gradient

    @property
    def accumulated_bytes(self) -> float:
        """None where a GEMM adds. In former code the first micro-batch's stay where they are, and
        later ones are read, with those to which they are added, and written."""
        later = 1 - 1 / self.num_micro_batches
        return 0.0 if self.adds_in_gemm else (self.sizes.weight + 2.0 * self.gradient_width) * later

    @property
    def hiding_passes(self) -> Pass:
        """No backward in former code, which reduced gradients when the last one was done."""
        return Pass(float(self.gathers_ahead), float(self.hides_reduction))

    @property
    def narrow_experts(self) -> bool:
        """Grouped GEMMs of Transformer Engine are of fp8 too."""
        return True

    @property
    def gathers_without_copy(self) -> bool:
        """Megatron-LM's parameters are views of the buffer that is gathered."""
        return True

    @property
    def unfused(self) -> float:
        """More where kernels of former code were not fused."""
        return 1.0 if self.fused else UNFUSED

    def crossing_share(self, nodes: float) -> float:
        """Share of token copies that cross: all, or one for each node with some of its experts."""
        copies = self.model.top_k
        return nodes * (1 - (1 - 1 / nodes) ** copies) / copies if self.once_per_node else 1.0

    @property
    def block_bytes(self) -> float:
        """Bytes saved by code from before flash attention: arXiv:2205.05198, equations 1 to 6, with
        general widths, gated MLPs and experts."""
        if self.flash:
            return 0.0
        m, size, tp = self.model, self.sizes.weight, self.layout.tp
        queries, keys = m.num_heads * m.head_dim, 2 * m.num_kv_heads * m.head_dim
        shared = 4 * size * m.hidden_size + 2 * m.hidden_size * bool(m.dropout)
        heads = size * (2 * queries + keys)
        if self.recompute == "none":  # the softmax, and where it is dropped a mask and the result
            per_score = size + (1 + size) * bool(m.attention_dropout)
            heads += per_score * m.num_heads * self.seq_len
        widths = 1 + m.up_factor
        mlp = widths * m.ffn_hidden_size * size / tp
        if m.num_experts:
            routed = 2 * m.hidden_size * self.layout.etp + widths * m.moe_ffn_hidden_size
            mlp = (m.top_k * routed + widths * m.shared_expert_ffn_hidden_size) * size / tp
            mlp += 2 * 4 * m.num_experts / self.sequence_shards
        return self.tokens * (shared / self.sequence_shards + heads / tp + mlp)


@dataclass(frozen=True)
class PublishedPhysics(Physics):
    """`Physics`, and the constants of attention before flash attention."""

    unfused_attention: float = 0.37
    """of the sustained rate, reached by the batched products around a written-out softmax"""
    misaligned: float = 0.0919
    """of that, where a head's rows are no multiple of 16 bytes and tensor cores idle"""
    eager_call: float = 2.62e-06
    """`call` of code without fused kernels"""
    eager_collective: float = 6.92e-05
    """and its `collective`"""
    blackwell_gemm: float = BLACKWELL.gemm
    """`gemm` on Blackwell"""
    blackwell_attention: float = BLACKWELL.attention
    """`attention` on Blackwell"""


PUBLISHED = PublishedPhysics()


@cache
def published(
    device: Device, physics: PublishedPhysics = PUBLISHED, software: str = "megatron"
) -> Device:
    """The device of a published run, whose software reaches these shares of its rates."""
    reached = {}
    if "nvfp4" in device.flops:
        reached = {"gemm": physics.blackwell_gemm, "attention": physics.blackwell_attention}
    if software == "eager":
        reached |= {"call": physics.eager_call, "collective": physics.eager_collective}
    return replace(device, physics=replace(physics, **reached))


def since(source: str, month: int, former: bool = False) -> bool:
    """Whether a source may use what appeared in a month, by the number of its preprint. One without
    may use everything, but `former` code, of fp16 or fp32, what there was in FP16_CODE."""
    preprint = re.search(r"arXiv[: ]*(\d{4})\.", source)
    if preprint:
        return int(preprint[1]) >= month
    return month <= FP16_CODE or not former


@attention_seconds.register
def _(work: PublishedWork, device: Device) -> Pass:
    """Seconds of unfused attention, which computes the full square and moves every score."""
    if work.flash:
        return attention_seconds.dispatch(Workload)(work, device)
    physics = device.physics
    assert isinstance(physics, PublishedPhysics), "of former software"
    aligned = 1.0 if work.model.head_dim % 8 == 0 else physics.misaligned
    rate = attention_rate(work, device) * physics.unfused_attention * aligned
    seconds = attention_flops(work, work.seq_len) / rate
    heads = work.model.num_heads / work.layout.tp
    scores = work.tokens * work.seq_len * heads * work.sizes.weight
    # Products write and read them once each, softmax and dropout read and write them once each, and
    # so do scale and mask where they are kernels of their own; a byte of the dropout's mask.
    passes = 6.5 if work.fused else 10.5
    moved = scores * passes / device.reached_bandwidth
    return Pass(seconds + moved, 2 * seconds + 1.5 * moved)


@tensor_parallel.register
def _(work: PublishedWork, device: Device) -> Pass:
    """Seconds of a block of Optimus, whose products are all A B: blocks of activations go along
    rows of the mesh, blocks of weights along columns, and twice as much in the backward pass, which
    is the 7bsh + 12h^2 and, with recomputation, 21bsh + 36h^2 of arXiv:2104.05343, table 1.
    Broadcasts are pipelined, so that each link carries a block once; a node holds a part of the
    mesh that is about as wide as it is high, the paper's bunched placement."""
    q, size = work.layout.tp_rows, work.sizes.weight
    if q == 1:
        return tensor_parallel.dispatch(Workload)(work, device)
    shapes = dense_gemms(work)
    rows = float(sum(m * k for m, _, k in shapes) * size / q)
    columns = float(sum(k * n for _, n, k in shapes) * size / q)
    wide = 2 ** ceil(log2(device.node_size) / 2)
    high = 1 if q * q <= device.node_size else wide
    across = 1 if q * q <= device.node_size else device.node_size // wide
    once = rows / group_bandwidth(q, across, device)
    once += columns / group_bandwidth(q, high, device)
    step = device.link if q * q <= device.node_size else device.network
    once += 2 * q * len(shapes) * (q - 1) * step.latency
    return Pass(once, 2 * once)
