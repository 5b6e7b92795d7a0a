"""Measuring a device and a run: the product rate that MFU divides by."""

from time import perf_counter

import torch

from mtcli.core.engine import DTYPES
from mtcli.core.runtime import Runtime
from mtcli.core.spec.config import RunConfig

SIZE = 1024  # a product large enough to run at full speed, and 10 to 20 ms on a laptop core


def peak_flops(config: RunConfig, runtime: Runtime) -> float:
    """The rate of this rank's device in FLOP/s that MFU and HFU are fractions of.

    GPUs: the datasheet's dense rate of train.precision, from cost/hardware.py. CPU: the best of
    five products measured on this rank's threads while all ranks measure theirs.
    """
    dtype = DTYPES[config.train.precision]
    a, b = (torch.randn(SIZE, SIZE, device=runtime.device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(5):
        start = perf_counter()
        (a @ b).sum().item()
        seconds.append(perf_counter() - start)
    return 2.0 * SIZE**3 / min(seconds)
