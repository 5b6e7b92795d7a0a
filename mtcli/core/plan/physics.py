"""The shares of a device's rates that a training step reaches, and its latencies."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Physics:
    """The shares and latencies that separate a step from the datasheet's rates.

    Some were measured alone; `benchmarks/fit_physics.py` fitted the others together, once, on
    published runs (docs/plan.md). None is specific to a source, model or row.
    """

    gemm: float = 0.883
    """share of the sustained matrix rate that a large product reaches inside a training step"""
    narrow_gemm: float = 0.993
    """the same share for 8- and 4-bit products, which also rescale their inputs"""
    fill: float = 128.0
    """inner dimension at which a product's prologue costs as much as its work: a tile's width"""
    attention: float = 0.391
    """share of the sustained matrix rate that flash attention reaches"""
    memory: float = 0.9
    """share of the memory bandwidth that element-wise kernels reach: a copy's on any device"""
    traffic: float = 2.43
    """memory traffic of element-wise work over that of perfectly fused kernels"""
    link: float = 0.8
    """share of a node's own bandwidth that collectives reach: about 235 of 300 GB/s on A100s"""
    network: float = 0.623
    """share of the bandwidth between nodes that collectives reach"""
    launch: float = 5e-6
    """seconds between kernels that the host can keep up"""
    data_overlap: float = 0.85
    """share of a pass that hides the exchange of gradients and weights: NCCL's channels take about
    20 of an A100's 108 or an H100's 132 processors meanwhile"""
    shard_overlap: float = 0.435
    """share of the shorter of a block's pass and its ZeRO-3 gather that the longer hides"""
    step_overhead: float = 0.053
    """seconds of a step outside of its micro-batches: data, logging, the host's bookkeeping"""
    tile: int = 128
    """rows and columns of an output tile of a product"""
    ring_overlap: float = 1.0
    """share of a ring's attention that hides its hops"""
    element: float = 0.0
    """seconds of an element of a function such as exp, where memory does not hide it"""
    call: float = 0.0
    """seconds of the host for an operation, which its device's work does not hide"""


PHYSICS = Physics()

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
        launch=0.0,
        data_overlap=0.0,
        shard_overlap=0.0,
        step_overhead=OVERHEAD_CALLS * call,
        tile=16,
        ring_overlap=0.0,
        element=element,
        call=call,
    )
