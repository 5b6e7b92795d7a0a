"""Measures a device for `plan`: GEMMs of several shapes, a copy, attention, the host's calls, and
with several ranks collectives by size.

A GPU works for a second or two at each, so that its clock is that of a long run, and the later half
counts. On a CPU the quickest of many tries counts, by the thread's processor time, as other
programs may run beside.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ReduceOp

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.collectives import all_gather, all_reduce, reduce_scatter
from mtcli.core.parallel.groups import Axis, make_groups
from mtcli.core.plan.measure_cpu import call_seconds, copy_rate, element_seconds, seconds_of
from mtcli.core.profile.calibration_file import TimedCollective, TimedGemm
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.peak_flops import device_name
from mtcli.kernels.gemm import DTYPES, matmul, runs_in_float32

SECONDS = 2.0  # of a GPU's work at one shape
TRIES = 5  # of a collective, after one to begin with
SHAPES = {  # (m, n, k) of GEMMs
    "cuda": (
        (8192, 8192, 8192),
        (8192, 28672, 4096),
        (8192, 4096, 14336),
        (8192, 6144, 4096),
        (8192, 1024, 8192),
        (4096, 4096, 1024),
    ),
    "cpu": ((1024, 1024, 1024), (512, 2048, 512), (512, 512, 2048)),
}
ATTENTION = {"cuda": (2, 32, 4096, 128), "cpu": (1, 4, 512, 64)}  # sequences, heads, tokens, dim
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes
SENT = {"cuda": (2**16, 2**24, 2**28), "cpu": (2**12, 2**20, 2**23)}  # bytes of collectives


def measure_device(runtime: Runtime, precision: str) -> dict[str, Any]:
    """The JSON of `plan --calibration`, from this rank; collectives are of all ranks."""
    device, dtype = runtime.device, DTYPES[precision]
    gemms = [TimedGemm(*shape, gemm_seconds(shape, device, dtype)) for shape in SHAPES[device.type]]
    call = call_seconds()
    found = {
        "device": device_name(device),
        "precision": precision,
        "gemms": gemms,
        "copy": _copy(device),
        "attention": _attention(device, dtype),
        "call": call,
        "launch": _launch(device),
        "ranks": runtime.world,
        "nodes": max(1, runtime.world // runtime.local_world),
        "collectives": list(collectives(runtime, world_axis(runtime))),
    }
    if device.type == "cpu":
        from mtcli.core.plan.hardware import socket_rate

        widens = runs_in_float32(torch.empty(0, dtype=torch.bfloat16))
        found |= {"element": element_seconds(), "socket": socket_rate(), "widens": widens}
    return found


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: of a CPU's quickest, or the mean of the later half of a GPU's."""
    if device.type == "cpu":
        return seconds_of(run)
    run()
    means = list[float]()
    end = perf_counter() + SECONDS
    while perf_counter() < end or len(means) < 2:
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            run()
        done.record()
        done.synchronize()
        means.append(float(begin.elapsed_time(done)) / 1e4)
    return median(means[len(means) // 2 :])


def gemm_seconds(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of a GEMM of (m, n, k)."""
    m, n, k = shape
    a, b = (torch.randn(size, device=device).to(dtype) for size in ((m, k), (k, n)))
    return _seconds(lambda: matmul(a, b), device)


def _copy(device: torch.device) -> float:
    """Bytes/s read and written."""
    if device.type == "cpu":
        return copy_rate()
    source = torch.ones(COPIED["cuda"], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _attention(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention: two GEMMs forward and five back, over half of the square."""
    shape = ATTENTION[device.type]
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def passes() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(q.detach())

    sequences, heads, tokens, dim = shape
    flops = 7 * 2.0 * sequences * heads * tokens * tokens / 2 * dim
    return flops / _seconds(passes, device)


def _launch(device: torch.device) -> float:
    """Seconds of the host that an operation takes on a GPU's tensor beyond those on a CPU's."""
    if device.type == "cpu":
        return 0.0

    def host(x: Tensor) -> float:
        begin = perf_counter()
        for _ in range(500):  # fewer than the queue of launches holds
            x.add_(1.0)
        return (perf_counter() - begin) / 500

    tries = []
    for _ in range(20):
        torch.cuda.synchronize(device)
        tries.append(host(torch.ones(8, device=device)))
    return max(0.0, min(tries) - min(host(torch.ones(8)) for _ in range(20)))


def world_axis(runtime: Runtime) -> Axis:
    """The axis of all ranks; collective over them."""
    layout = ParallelLayout(runtime.world)
    groups = make_groups(layout, runtime.rank, runtime.device, recorder=runtime.recorder)
    return groups.axes["world"]


def collectives(runtime: Runtime, axis: Axis) -> Iterator[TimedCollective]:
    """Yields the quickest of TRIES of each collective and size, the slowest rank's."""
    if runtime.world == 1:
        return
    for moved in SENT[runtime.device.type]:
        rows = moved // 4 // axis.size  # of float32, on each rank
        full, shard = (torch.zeros(n, device=runtime.device) for n in (rows * axis.size, rows))
        runs = {
            "all_reduce": partial(all_reduce, full, axis),
            "all_gather": partial(all_gather, shard, axis),
            "reduce_scatter": partial(reduce_scatter, full, axis),
        }
        for kind, run in runs.items():
            yield TimedCollective(kind, full.nbytes, _slowest(run, axis, runtime.device))


def _slowest(run: Callable[[], Any], axis: Axis, device: torch.device) -> float:
    seconds = torch.empty(TRIES + 1, dtype=torch.float64, device=device)
    for number in range(TRIES + 1):
        all_reduce(torch.zeros(1, device=device), axis).item()  # all ranks begin together
        begin = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[number] = perf_counter() - begin
    return float(all_reduce(seconds, axis, ReduceOp.MAX)[1:].min())
