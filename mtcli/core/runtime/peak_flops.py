"""The peak FLOP/s of a device, by which MFU and HFU divide: from a GPU's datasheet, or measured.

Imports torch only inside functions, as `plan` reads the datasheets' rates.
"""

from collections.abc import Collection
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Dense rates of GEMMs (no structured sparsity; fp32 is not TF32), in TFLOP/s by precision; their
# sources are in plan/hardware.py.
_HOPPER = {"fp64": 67.0, "fp32": 67.0, "bf16": 989.4, "fp8": 1978.9}
_AMPERE = {"fp64": 19.5, "fp32": 19.5, "bf16": 312.0}
DENSE_TFLOPS = {
    "v100-32gb": {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0},
    "a100-40gb": _AMPERE,
    "a100-80gb": _AMPERE,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": {"fp64": 37.0, "fp32": 80.0, "bf16": 2250.0, "fp8": 4500.0, "nvfp4": 9000.0},
    "b300": {"fp64": 1.2, "fp32": 80.0, "bf16": 2250.0, "fp8": 4500.0, "nvfp4": 13500.0},
    "gb200": {"fp64": 40.0, "fp32": 80.0, "bf16": 2500.0, "fp8": 5000.0, "nvfp4": 10000.0},
    "gb300": {"fp64": 1.3, "fp32": 80.0, "bf16": 2500.0, "fp8": 5000.0, "nvfp4": 15000.0},
    "rtx-5000": {"fp32": 11.2, "fp16": 89.2},
}
OTHER_BOARDS = {"pcie", "nvl", "ada", "laptop"}  # boards with the same names and other rates
# By precision, those in which its GEMMs may run: the first that the device has.
WIDER = {
    "fp64": ("fp64", "fp32"),
    "fp32": ("fp32",),
    "bf16": ("bf16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp32"),
    "nvfp4": ("nvfp4", "fp8", "bf16", "fp32"),
}
SIDE = {"cpu": 1024, "cuda": 8192}  # of a GEMM that runs at full speed; 10 to 20 ms on a core


def computes_in(rates: Collection[str], precision: str) -> str:
    """The precision in which GEMMs of `precision` run: itself, or the next wider of `rates`."""
    return next(name for name in WIDER[precision] if name in rates)


def peak_flops(precision: str, matmul: str, device: "torch.device") -> float:
    """The peak FLOP/s of this rank's device, by train.precision and train.matmul.

    Listed GPUs: the datasheet's dense rate; for TF32 half of bfloat16's. CPUs and unlisted GPUs:
    the best of five GEMMs, measured on all ranks at once.
    """
    name = device_name(device)
    if name not in DENSE_TFLOPS:
        return _measured(precision, device)
    rates = DENSE_TFLOPS[name]
    tflops = rates[computes_in(rates, precision)]
    if (precision, matmul) == ("fp32", "tf32"):
        tflops = max(rates[computes_in(rates, "bf16")] / 2, tflops)
    return tflops * 1e12


def run_peak_flops(precision: str, matmul: str, device: "torch.device") -> float:
    """The `peak_flops` of a run; 0 on a CPU, whose rate changes with other load: it once gave an
    MFU of 239 %."""
    return 0.0 if device.type == "cpu" else _known_peak(precision, matmul, device)


_known_peak = cache(peak_flops)  # that every model of a sweep asks for


def device_name(device: "torch.device") -> str:
    """The device's key in DENSE_TFLOPS: "h100", ..., "cpu", or "" for an unlisted GPU."""
    import torch

    return "cpu" if device.type == "cpu" else board_name(torch.cuda.get_device_name(device))


def board_name(board: str) -> str:
    """The key of a GPU by its driver's name, or "" where it is not listed.

    "NVIDIA A100-SXM4-80GB" is a100-80gb; PCIe and NVL boards have other rates, and are not listed.
    """
    words = set(board.lower().replace("-", " ").split())
    listed = [name for name in DENSE_TFLOPS if set(name.split("-")) <= words]
    return listed[0] if listed and not words & OTHER_BOARDS else ""


def _measured(precision: str, device: "torch.device") -> float:
    import torch

    from mtcli.kernels.gemm import DTYPES, matmul

    dtype, side = DTYPES[precision], SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(5):
        start = perf_counter()
        matmul(a, b).sum().item()
        seconds.append(perf_counter() - start)
    return 2.0 * side**3 / min(seconds)
