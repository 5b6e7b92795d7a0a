"""The GPU benchmark's entries on a machine without one: interpreted, and compiled for another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtcli.kernels.launch import HAS_TRITON

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "bench_kernels.py"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def bench(*flags):
    return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True)


@needs_triton
def test_every_entry_of_the_benchmark_gives_the_first_rivals_results_interpreted():
    done = bench("--device", "cpu", "--smoke")
    assert done.returncode == 0, done.stderr
    assert "swiglu forward: as torch" in done.stdout and "swiglu backward" in done.stdout


@needs_triton
def test_kernels_of_two_architectures_are_compiled_in_one_process(tmp_path):
    code = """
import torch
from mtcli.kernels import swiglu
from mtcli.kernels.ahead_of_time import compiled_for
for arch in (80, 90):
    with compiled_for("cuda", arch, 32, default_only=True) as compilations:
        swiglu.swiglu(torch.empty(4, 32))
    print([(x.name, x.config, x.is_default, x.error) for x in compilations])
caches = [kernels for kernels, *_ in swiglu._forward.jitted.device_caches.values()]
print(sorted(k.metadata.target.arch for kernels in caches for k in kernels.values()))
"""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    *launches, architectures = done.stdout.splitlines()
    config = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}
    assert launches == [str([("swiglu._forward", config, True, "")])] * 2
    assert architectures == "[80, 90]"


@needs_triton
def test_a_kernel_that_cannot_be_compiled_is_named_and_does_not_keep_others_from_it(tmp_path):
    code = """
import torch
from mtcli.kernels.ahead_of_time import compiled_for
from mtcli.kernels.launch import kernel

@kernel([{"BLOCK": 24}, {"BLOCK": 32}])
def _copy(x_ptr, BLOCK):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at))

_copy.function.__annotations__["BLOCK"] = "tl.constexpr"
with compiled_for("cuda", 90, 32) as compilations:
    _copy[1,](torch.empty(32))
for each in compilations:
    print(each.config, each.is_default, each.compiled is None, "power of 2" in each.error)
"""
    script = tmp_path / "copy_kernel.py"  # triton reads a kernel's source from its file
    script.write_text(code)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "{'BLOCK': 24} True True True",
        "{'BLOCK': 32} False False False",
    ]


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="there may be a GPU")
def test_without_a_gpu_the_benchmark_says_so_in_one_line():
    done = bench()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: torch sees no GPU here; try --device cpu --smoke\n"
