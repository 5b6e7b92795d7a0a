"""The GPU benchmark's entries on a machine without one: interpreted, and compiled for another."""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import mtcli.kernels
from mtcli.kernels.launch import HAS_TRITON, TritonKernel

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "bench_kernels.py"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def bench(*flags, cache=None):
    environment = os.environ | ({"TRITON_CACHE_DIR": str(cache)} if cache else {})
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@needs_triton
def test_every_entry_of_the_benchmark_gives_the_first_rivals_results_interpreted():
    done = bench("--device", "cpu", "--smoke")
    assert done.returncode == 0, done.stderr
    assert "swiglu forward: as torch" in done.stdout and "swiglu backward" in done.stdout


@needs_triton
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path):
    done = bench("--compile", "90", "--first", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = [name for name in launched() if f": {name} " not in done.stdout]
    assert missing == [], "a kernel that no entry of the benchmark launches"


@needs_triton
def test_kernels_of_two_architectures_are_compiled_in_one_process(tmp_path):
    code = """
import torch
from mtcli.kernels import swiglu
from mtcli.kernels.ahead_of_time import compiled_for
for arch in (80, 90):
    with compiled_for("cuda", arch, 32, default_only=True) as names:
        swiglu.swiglu(torch.empty(4, 32))
    print(names)
caches = [kernels for kernels, *_ in swiglu._forward.jitted.device_caches.values()]
print(sorted(k.metadata.target.arch for kernels in caches for k in kernels.values()))
"""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    *names, architectures = done.stdout.splitlines()
    assert names == ["[\"swiglu._forward {'ROWS': 8, 'COLUMNS': 256, 'num_warps': 4}\"]"] * 2
    assert architectures == "[80, 90]"


def launched():
    """The kernels of the package but those that other kernels call."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(mtcli.kernels.__path__, "mtcli.kernels.")
        if not module.name.endswith(".ahead_of_time")  # imports triton
    ]
    kernels = [
        x for module in modules for x in vars(module).values() if isinstance(x, TritonKernel)
    ]
    called = {name for kernel in kernels for name in kernel.function.__code__.co_names}
    return [k.name for k in kernels if k.function.__name__ not in called]


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="there may be a GPU")
def test_without_a_gpu_the_benchmark_says_so_in_one_line():
    done = bench()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: torch sees no GPU here; try --device cpu --smoke\n"
