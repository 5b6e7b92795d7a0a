"""The few constants of the time model, each one a physical share or latency.

Some are known from measurements of their own; the others were fitted once, together, on published
runs by `benchmarks/fit_physics.py` (docs/plan.md says which, and how well they predict runs that
they were not fitted on). There is none per source, model or row.
"""

from dataclasses import dataclass

FITTED = (
    "gemm",
    "narrow_gemm",
    "attention",
    "unfused_attention",
    "misaligned",
    "traffic",
    "network",
    "data_overlap",
    "step_overhead",
)


@dataclass(frozen=True)
class Physics:
    """What separates a step from the datasheet's rates."""

    gemm: float = 0.883
    """of the sustained matrix rate, reached by a large product inside a training step"""
    narrow_gemm: float = 0.993
    """the same for 8- and 4-bit products, which also rescale their inputs"""
    fill: float = 128.0
    """inner dimension at which a product's prologue costs as much as its work: a tile's width"""
    attention: float = 0.391
    """of the sustained rate, reached by flash attention"""
    unfused_attention: float = 0.265
    """the same for the batched products around a written-out softmax"""
    misaligned: float = 0.123
    """of that, where a head's rows are no multiple of 16 bytes and tensor cores idle"""
    memory: float = 0.9
    """of the memory bandwidth, reached by element-wise kernels: a copy's on any of the devices"""
    traffic: float = 2.43
    """memory traffic of element-wise work over that of perfectly fused kernels"""
    link: float = 0.8
    """of the bandwidth inside a node, reached by collectives: about 235 of 300 GB/s on A100s"""
    network: float = 0.623
    """of the bandwidth between nodes"""
    launch: float = 5e-6
    """seconds between kernels that the host can keep up"""
    data_overlap: float = 0.435
    """of a pass, usable to hide data parallel communication"""
    step_overhead: float = 0.053
    """seconds of a step outside of its micro-batches: data, logging, the host's bookkeeping"""


PHYSICS = Physics()
