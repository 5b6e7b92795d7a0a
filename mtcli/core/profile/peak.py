"""The peak FLOP/s of this rank's device, which MFU and HFU are fractions of."""

from time import perf_counter

import torch

from mtcli.core.config.schema import RunConfig
from mtcli.core.model.build import DTYPES
from mtcli.core.plan.hardware import GPUS
from mtcli.core.runtime.launch import Runtime
from mtcli.kernels.gemm import matmul

SIDE = {"cpu": 1024, "cuda": 8192}  # large enough to run at full speed; 10 to 20 ms on a core


OTHER_BOARDS = {"pcie", "nvl", "ada", "laptop"}  # of the same names, with other rates


def peak_flops(config: RunConfig, runtime: Runtime) -> float:
    """The rate of this rank's device in FLOP/s that MFU and HFU are fractions of.

    GPUs: the datasheet's dense rate of train.precision, from plan/hardware.py. CPU, and boards that
    are not listed there: the best of five products, measured on all ranks at once.
    """
    name = device_name(runtime.device)
    if name in GPUS:
        return GPUS[name].peak(config.train.precision)
    dtype, side = DTYPES[config.train.precision], SIDE[runtime.device.type]
    a, b = (torch.randn(side, side, device=runtime.device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(5):
        start = perf_counter()
        matmul(a, b).sum().item()
        seconds.append(perf_counter() - start)
    return 2.0 * side**3 / min(seconds)


def device_name(device: torch.device) -> str:
    """The device's name in plan/hardware.py: "cpu", "h100", ..., or "" for an unlisted board."""
    return "cpu" if device.type == "cpu" else board_name(torch.cuda.get_device_name(device))


def board_name(board: str) -> str:
    """The listed name of a board as its driver calls it, or "" where it is not listed.

    "NVIDIA A100-SXM4-80GB" is a100-80gb; the PCIe and NVL boards of a name have other rates.
    """
    words = set(board.lower().replace("-", " ").split())
    listed = [name for name in GPUS if set(name.split("-")) <= words]
    return listed[0] if listed and not words & OTHER_BOARDS else ""
