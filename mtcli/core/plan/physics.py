"""The shares of a device's rates that a training step reaches, and its latencies."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Physics:
    """The shares and latencies that separate a step from the datasheet's rates.

    Some were measured alone; `benchmarks/fit_physics.py` fitted the others together, once, on
    published runs (docs/reference/plan.md). None is specific to a source, model or row.
    """

    gemm: float = 0.897
    """share of the sustained matrix rate that a large product reaches inside a training step"""
    narrow_gemm: float = 1.0
    """the same share for 8- and 4-bit products, which also rescale their inputs"""
    fill: float = 128.0
    """inner dimension at which a product's prologue costs as much as its work: a tile's width"""
    attention: float = 0.416
    """share of the sustained matrix rate that flash attention reaches"""
    memory: float = 0.9
    """share of the memory bandwidth that element-wise kernels reach: a copy's on any device"""
    traffic: float = 2.43
    """memory traffic of element-wise work over that of perfectly fused kernels"""
    link: float = 0.8
    """share of a node's own bandwidth that collectives reach: about 235 of 300 GB/s on A100s"""
    network: float = 0.608
    """share of the bandwidth between nodes that collectives reach"""
    kernel: float = 1e-5
    """seconds in which a kernel fills the device and empties it: 4 us for about 60 kernels of a
    block, of which its 24 steps stand for all"""
    call: float = 1e-6
    """seconds of the host for an operation: 2.2 ms for a layer's 1,125 on 2 cores of an EPYC, whose
    additions take 2.8 us, over 2.4, as those of an H100's host take 1.0 to 1.3"""
    collective: float = 2.6e-5
    """seconds of the host to start a collective of n ranks, over log2(n): `call` times what
    was fitted on runs of code that is slower to start both"""
    host_adds: bool = False
    """whether the device's work cannot hide the host's, as on a CPU"""
    data_overlap: float = 0.85
    """share of a pass that hides the exchange of gradients and weights: NCCL's channels take about
    20 of an A100's 108 or an H100's 132 processors meanwhile"""
    shard_overlap: float = 0.372
    """share of the shorter of a block's pass and its ZeRO-3 gather that the longer hides"""
    step_overhead: float = 0.0114
    """seconds of a step outside of its micro-batches: data, logging, the host's bookkeeping"""
    tile: int = 128
    """rows and columns of an output tile of a product"""
    ring_overlap: float = 1.0
    """share of a ring's attention that hides its hops"""
    element: float = 0.0
    """seconds of an element of a function such as exp, where memory does not hide it"""


PHYSICS = Physics()
BLACKWELL = Physics(gemm=0.575, attention=0.64)
"""Products of 16 bits are held by the board's power: 0.45 to 0.50 of the datasheet's rate when
measured alone (SimuMax, configs/system/b200_bf16_ceperm.json), where attention reaches 0.48."""

OVERHEAD_CALLS = 200  # of the host, in a step outside of its micro-batches


def host_physics(call: float, element: float) -> Physics:
    """The shares and latencies of a CPU, on which communication takes cores from the
    computation and hides nothing. Set from steps of `benchmarks/bench_cpu_rates.py` on 2 cores
    of an AMD EPYC."""
    return Physics(
        gemm=0.85,
        narrow_gemm=0.85,
        fill=32.0,
        attention=0.3,
        memory=1.0,
        traffic=2.43,
        link=1.0,
        network=1.0,
        data_overlap=0.0,
        shard_overlap=0.0,
        step_overhead=OVERHEAD_CALLS * call,
        tile=16,
        ring_overlap=0.0,
        element=element,
        call=call,
        kernel=0.0,
        collective=0.0,
        host_adds=True,
    )
