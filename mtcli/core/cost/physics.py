"""The few constants of the time model, each one a physical share or latency.

They were fitted once, together, on published runs (docs/plan.md says which and how well they hold);
there is none per source, model or row.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Physics:
    """What separates a step from the datasheet's rates."""

    gemm: float = 0.87
    """of the sustained matrix rate, reached by a large product inside a training step"""
    narrow_gemm: float = 1.0
    """the same for 8- and 4-bit products, which also rescale their inputs"""
    fill: float = 32.0
    """inner dimension at which a product's prologue costs as much as its work"""
    attention: float = 0.44
    """of the sustained rate, reached by flash attention"""
    unfused_attention: float = 0.13
    """the same for the batched products around a written-out softmax"""
    misaligned: float = 0.19
    """of that, where a head's rows are no multiple of 16 bytes and tensor cores idle"""
    memory: float = 0.92
    """of the memory bandwidth, reached by element-wise kernels"""
    traffic: float = 2.35
    """memory traffic of element-wise work over that of perfectly fused kernels"""
    link: float = 0.6
    """of a link's bandwidth, reached by collectives and hops"""
    latency: float = 9.3e-6
    """seconds of a collective per doubling of its ranks"""
    launch: float = 5e-6
    """seconds between kernels that the host can keep up"""
    tensor_overlap: float = 0.04
    """of tensor and expert parallel communication, hidden behind products"""
    data_overlap: float = 0.33
    """of the backward pass, usable to hide data parallel communication"""
    step_overhead: float = 0.015
    """seconds of a step outside of its micro-batches: data, logging, the host's bookkeeping"""


PHYSICS = Physics()
