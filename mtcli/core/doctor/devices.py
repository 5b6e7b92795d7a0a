"""Checks of devices: the GPUs that torch sees, the links between them, and a GEMM."""

import re
from collections import Counter
from itertools import permutations

import torch

from mtcli.core.doctor import readings
from mtcli.core.doctor.diagnosis import Diagnosis, broken, ok, warn
from mtcli.core.plan.hardware import gib
from mtcli.core.profile.device_rates import SHAPES, gemm_seconds
from mtcli.core.runtime.launch import cores, set_gpu_matmul, set_matmul
from mtcli.core.runtime.peak_flops import DENSE_TFLOPS, device_name
from mtcli.kernels.gemm import DTYPES, matmul

FREE = 0.9  # of a GPU's memory, that no other process uses
SLOW = 0.5  # of the datasheet's rate
QUERY = "index,driver_version,ecc.errors.uncorrected.volatile.total"
ROWS, COLUMNS = 16, 256  # of a GEMM's result, that are computed again in float64


def num_gpus(device: str) -> int:
    """The number of GPUs that torch may use."""
    return 0 if device == "cpu" else torch.cuda.device_count()


def devices(device: str) -> Diagnosis:
    """The GPUs that torch sees: names, free memory, driver and memory errors."""
    gpus, listed = num_gpus(device), readings.names_in("/proc/driver/nvidia/gpus")
    if not gpus:
        return _without_gpu(device, len(listed))
    names = [torch.cuda.get_device_properties(i).name for i in range(gpus)]
    room = [torch.cuda.mem_get_info(i) for i in range(gpus)]
    counts = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
    table = readings.nvidia_smi(f"--query-gpu={QUERY}", "--format=csv,noheader") or ""
    boards = [[word.strip() for word in line.split(",")] for line in table.splitlines()]
    driver = boards[0][1] if boards else "unknown"
    free = min(left for left, _ in room)
    found = f"{counts}, {gib(free)} free on each; driver {driver}, CUDA {torch.version.cuda}"
    numbers = {"gpus": names, "free_bytes": [left for left, _ in room], "driver": driver}
    failing = [index for index, _, errors in boards if errors.isdecimal() and int(errors)]
    if failing:
        found += f"; uncorrected memory errors on GPU {', '.join(failing)}"
        return broken(found, f"sudo nvidia-smi --gpu-reset -i {','.join(failing)}", **numbers)
    used = [i for i, (left, total) in enumerate(room) if left < FREE * total]
    if used:
        found += f"; others use GPU {', '.join(map(str, used))}"
        return warn(found, "nvidia-smi shows the processes", **numbers)
    return ok(found, **numbers)


def _without_gpu(device: str, listed: int) -> Diagnosis:
    if device == "cpu" or not (listed or device == "cuda"):
        return ok("no GPU: the CPU computes", gpus=[], listed=listed)
    if torch.version.cuda is None:
        found = f"{listed} GPUs, and a torch {torch.__version__} for CPUs alone"
        fix = "pip install --force-reinstall torch, from https://pytorch.org/get-started"
        return broken(found, fix, gpus=[], listed=listed)
    found = f"{listed} GPUs, and torch's CUDA {torch.version.cuda} finds none"
    fix = "nvidia-smi shows the driver; CUDA_VISIBLE_DEVICES must name a GPU, where it is set"
    return broken(found, fix, gpus=[], listed=listed)


def links(device: str) -> Diagnosis:
    """The links between GPUs, and the pairs that do not reach each other's memory."""
    gpus = num_gpus(device)
    if gpus < 2:
        return ok("skipped: they are between GPUs, and there are not two", gpus=gpus)
    kinds = link_kinds(readings.nvidia_smi("topo", "-m") or "")
    pairs = list(permutations(range(gpus), 2))
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    shown = ", ".join(f"{count} pairs by {kind}" for kind, count in kinds.items()) or "unknown"
    numbers = {"gpus": gpus, "kinds": kinds, "apart": apart}
    if apart:
        found = f"{shown}; {len(apart)} of {len(pairs)} ways without peer access"
        return warn(found, "nvidia-smi topo -m; PCIe's ACS, off in the BIOS, allows it", **numbers)
    return ok(f"{shown}; all GPUs reach each other's memory", **numbers)


def link_kinds(topology: str) -> dict[str, int]:
    """The number of pairs of GPUs by the kind of their link, such as NV18 or PHB, in the table that
    `nvidia-smi topo -m` prints."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", topology).splitlines()
    rows = [line.split()[1:] for line in lines if re.match(r"GPU\d+\s+(?!GPU)", line)]
    return dict(Counter(row[j] for i, row in enumerate(rows) for j in range(i + 1, len(rows))))


def gemm(device: str) -> Diagnosis:
    """The rate of a large GEMM, measured as `mtcli calibrate` does, and the error of its result."""
    on_gpu = device == "cuda" or num_gpus(device) > 0
    where, precision = torch.device("cuda" if on_gpu else "cpu"), "bf16" if on_gpu else "fp32"
    if on_gpu:
        set_gpu_matmul("fast")
    else:
        torch.set_num_threads(cores())
        set_matmul("fast")
    m, n, k = SHAPES[where.type][0]
    error = _error(m, n, k, where, DTYPES[precision])
    flops = 2.0 * m * n * k / gemm_seconds((m, n, k), where, DTYPES[precision])
    peak = DENSE_TFLOPS.get(device_name(where), {}).get(precision, 0.0) * 1e12
    found = f"{flops / 1e9:,.0f} GFLOP/s in {precision}, {m} x {n} x {k}, on the {where.type}"
    numbers = {"flops": flops, "error": error, "precision": precision, "device": where.type}
    if not error < max(1e-5, torch.finfo(DTYPES[precision]).eps / 1.5):
        fix = "this device computes wrong numbers: memtest86+, or `nvidia-smi -q -d ECC`"
        return broken(f"its result is wrong by {error:.1e}", fix, **numbers)
    if flops < SLOW * peak:
        found += f", of {peak / 1e9:,.0f}"
        return warn(found, "nvidia-smi -q -d PERFORMANCE says why its clock is low", **numbers)
    return ok(found, **numbers)


def _error(m: int, n: int, k: int, where: torch.device, dtype: torch.dtype) -> float:
    """The relative error of a few rows and columns of a GEMM, against float64 on the CPU."""
    a, b = (torch.randn(shape, device=where).to(dtype) for shape in ((m, k), (k, n)))
    computed = matmul(a, b)[-ROWS:, -COLUMNS:].cpu().double()
    exact = a[-ROWS:].cpu().double() @ b[:, -COLUMNS:].cpu().double()
    return float((computed - exact).norm() / exact.norm())
