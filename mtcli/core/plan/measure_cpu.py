"""Measures the rates of this machine's processor, as a subprocess of `calibration.py`.

Each is the best of many tries by processor time of the computing thread, which other programs do
not add to. Waiting threads sleep (OMP_WAIT_POLICY), as spinning would count. In all it takes 4 s of
processor time, most of it to import torch.
"""

import json
import sys
import timeit
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.plan.calibration import Calibration, Facts
from mtcli.core.plan.hardware import socket_rate
from mtcli.core.runtime.launch import set_matmul
from mtcli.core.runtime.process_pool import end_with
from mtcli.kernels.gemm import DTYPES, matmul, runs_in_float32

SIDE = 1024  # of a GEMM
COPIED = 2**24  # elements of a copy, more than most caches hold
ELEMENTS = 2**18  # of GELU, in a cache
CALLS = 100  # operations of a try
SECONDS = 0.2  # of tries of one rate
TRIES = 10  # at least


def main() -> None:
    """Prints the calibration as JSON, for the facts given as JSON."""
    end_with(sys.stdin.fileno())
    sys.stdout.write(json.dumps(measured(json.loads(sys.argv[1])).as_json()))


def measured(facts: Facts) -> Calibration:
    """Measures the rates of a rank with its share of the cores."""
    threads = max(1, facts["cores"] // facts["ranks"])
    set_matmul(facts["matmul"])
    torch.set_num_threads(facts["cores"])
    bandwidth = copy_rate() / facts["ranks"]  # every rank's together: they share it
    torch.set_num_threads(threads)
    return Calibration(
        flops=gemm_rate(facts["precision"]),
        memory_bandwidth=bandwidth,
        element=element_seconds(),
        call=call_seconds(),
        socket=socket_rate(),
        widens=runs_in_float32(torch.empty(0, dtype=torch.bfloat16)),
    )


def seconds_of(run: Callable[[], Any]) -> float:
    """Processor seconds of this thread for the quickest try, its share of parallel regions
    included."""
    run()
    end, seconds = thread_time() + SECONDS, list[float]()
    while len(seconds) < TRIES or thread_time() < end:
        seconds.append(timeit.timeit(run, timer=thread_time, number=1))
    return min(seconds)


def gemm_rate(precision: str) -> float:
    """FLOP/s of a large GEMM."""
    a, b = (torch.randn(SIDE, SIDE).to(DTYPES[precision]) for _ in range(2))
    return 2.0 * SIDE**3 / seconds_of(lambda: matmul(a, b))


def copy_rate() -> float:
    """Bytes/s read and written by a copy that exceeds the caches."""
    source = torch.ones(COPIED)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / seconds_of(lambda: target.copy_(source))


def element_seconds() -> float:
    """Seconds per element of GELU, which is bound by its arithmetic."""
    x = torch.randn(ELEMENTS)
    return seconds_of(lambda: F.gelu(x, approximate="tanh")) / ELEMENTS


def call_seconds() -> float:
    """Seconds of the host for an operation on a small tensor that autograd records."""
    x, scale = torch.ones(8), nn.Parameter(torch.ones(8))

    def calls() -> Tensor:
        y = x
        for _ in range(CALLS):
            y = y * scale
        return y

    return seconds_of(calls) / CALLS


if __name__ == "__main__":
    main()
