"""Kernels compiled for GPUs that are not there, and benchmarks/gpu/compile.py: costs read from
machine code, verdicts, and the page it writes."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from marks import slow

from mtcli.kernels.triton_launch import HAS_TRITON

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu"
PAGE = ROOT / "docs" / "reference" / "kernels-compiled.md"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

# 16384 numbers in 2 warps are 256 of each thread, of which 255 registers hold the fewer.
SPILLING = """
import re, subprocess, sys, torch, triton
from pathlib import Path
from machine_code import machine_codes
from mtcli.kernels.ahead_of_time import compiled_for
from mtcli.kernels.triton_launch import kernel

@kernel([{"num_warps": 2}])
def _centre(x_ptr, BLOCK):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(x_ptr + at, x - tl.sum(x, 0))

_centre.function.__annotations__["BLOCK"] = "tl.constexpr"
with compiled_for("cuda", 90, 32) as (compilations):
    _centre[1,](torch.empty(16384), BLOCK=16384)
compiled = compilations[0].compiled
code, again = machine_codes([compiled, compiled], 90)
assert code == again
print(code.registers, code.spill_stores, code.spill_loads)
source = Path(sys.argv[1])
source.write_text(compiled.asm["ptx"])
tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
command = [tool, "-v", "--regAllocOptLevel=2", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".o")]
said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
patterns = r"Used (\\d+) registers", r"(\\d+) bytes spill stores", r"(\\d+) bytes spill loads"
print(*(re.search(pattern, said)[1] for pattern in patterns))
print(code.load_bits, code.store_bits, code.programs, code.loop.loaded_bytes)
"""  # noqa: E501


TWO_ARCHITECTURES = """
import torch
from mtcli.kernels import swiglu
from mtcli.kernels.ahead_of_time import compiled_for
from mtcli.kernels.triton_launch import kernel

for arch in (80, 90):
    with compiled_for("cuda", arch, 32, default_only=True) as compilations:
        swiglu.swiglu(torch.empty(4, 32))
    print([(x.name, x.config, x.is_default, x.error) for x in compilations])
caches = [kernels for kernels, *_ in swiglu._forward.jitted.device_caches.values()]
print(sorted(k.metadata.target.arch for kernels in caches for k in kernels.values()))

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


@pytest.fixture
def scripts(monkeypatch):
    """The folder's modules can be imported, as its scripts import them."""
    monkeypatch.syspath_prepend(str(GPU))


def run(*words, **variables):
    path = os.pathsep.join([str(GPU), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path} | variables
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@needs_triton
def test_registers_and_spilled_bytes_are_those_that_ptxas_states(tmp_path):
    script = tmp_path / "spilling.py"  # triton reads a kernel's source from its file
    script.write_text(SPILLING)
    done = run(script, tmp_path / "kernel.ptx")
    assert done.returncode == 0, done.stderr
    ours, theirs, others = (line.split() for line in done.stdout.splitlines())
    assert ours == theirs and int(ours[1]) > 32
    # 255 registers in 2 warps: 2 of a scheduler's 64 at a time, 4 schedulers.
    assert others == ["128.0", "128.0", "4", str(16384 * 4)]


@needs_triton
def test_one_process_compiles_for_two_architectures_and_goes_on_where_it_cannot(tmp_path):
    script = tmp_path / "copy_kernel.py"
    script.write_text(TWO_ARCHITECTURES)
    done = run(script, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    config = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}
    assert done.stdout.splitlines() == [
        *[str([("swiglu._forward", config, True, "")])] * 2,
        "[80, 90]",
        "{'BLOCK': 24} True True True",
        "{'BLOCK': 32} False False False",
    ]


def test_accesses_of_local_arrays_are_none_of_spills(scripts):
    from machine_code import array_bytes

    ptx = """
    .local .align 4 .b8 __local_depot0[28];
    st.local.b32 [%r977], %r431;
    @%p1 st.local.v4.b32 [%r8+16], {%r1, %r2, %r3, %r4};
    ld.local.b64 %rd5, [%r52+24];
    ld.param.b32 %r1, [_normal_param_0];
    """
    assert (array_bytes(ptx, "st"), array_bytes(ptx, "ld")) == (4 + 16, 8)


def test_an_sm_holds_as_many_programs_as_fit(scripts):
    from machine_code import DEVICES, occupancy

    expected = {  # of arch, registers, warps and KiB, as NVIDIA's occupancy calculator has them
        (80, 64, 8, 0): (4, "registers"),
        (80, 32, 32, 0): (2, "threads"),
        (80, 32, 4, 80): (2, "shared"),
        (90, 32, 4, 112): (2, "shared"),
        (90, 32, 4, 114): (1, "shared"),
        (90, 16, 1, 0): (32, "programs"),
        (90, 255, 12, 0): (0, "registers"),
    }
    assert expected == {
        (arch, registers, warps, kib): occupancy(DEVICES[arch], registers, warps, kib * 1024)
        for arch, registers, warps, kib in expected
    }


def test_the_instructions_of_a_loop_are_without_those_of_loops_inside(scripts):
    from machine_code import Instruction, loops

    names = ["MOV", "LDG.E.128", "FADD", "BRA", "STG.E", "BRA", "BRA", "EXIT"]
    targets = {3: 2, 5: 1, 6: 7}  # the inner loop, the outer one, and a branch ahead
    lines = [Instruction(i, name, targets.get(i, i + 1)) for i, name in enumerate(names)]
    inner = Counter({"FADD": 1, "BRA": 1})
    assert loops(lines) == [inner, Counter({"LDG.E.128": 1, "STG.E": 1, "BRA": 1})]


def made_up(**changes):
    """A streaming kernel of sm_90: 4 programs of 4 warps, 8 KiB read and 8 KiB written each."""
    from machine_code import Loop, MachineCode

    numbers = {"tensor": 0.0, "issue": 100.0, "exponentials": 0.0} | {
        name: changes.pop(name) for name in ("tensor", "issue", "exponentials") if name in changes
    }
    loop = Loop(**numbers, spilled=0, loaded_bytes=8192, stored_bytes=8192)
    fields = {
        "warps": 4, "registers": 32, "shared_bytes": 0, "spill_stores": 0, "spill_loads": 0,
        "programs": 4, "limited_by": "threads", "load_bits": 128.0, "store_bits": 128.0,
        "in_flight_kib": 32.0, "multiplies": False, "serialized": False, "units": {},
    }  # fmt: skip
    return MachineCode(**(fields | changes), loop=loop)


def kernel_of(code, config=None, dtype="bf16"):
    from compile import Kernel

    return Kernel(90, "swiglu 5632", dtype, "forward", "a._b", config or {}, True, code=code)


def test_a_verdict_names_what_is_wrong(scripts):
    gemm = {"multiplies": True, "units": {"mma": 8}}
    wgmma = {"units": {"wgmma": 8}}
    for changes, config, verdict in (
        ({}, {}, ["ok"]),
        ({"spill_stores": 32, "shared_bytes": 227 * 1024}, {}, ["ok"]),
        ({"spill_loads": 33}, {}, ["spill"]),
        ({"shared_bytes": 227 * 1024 + 1, "programs": 0}, {}, ["smem"]),
        ({"programs": 0}, {}, ["registers"]),
        ({"load_bits": 63.0}, {}, ["narrow"]),
        (gemm, {"ROWS": 64}, ["no-wgmma"]),
        (gemm, {"ROWS": 32}, ["ok"]),
        (gemm | wgmma, {"ROWS": 64}, ["ok"]),
        (wgmma | {"serialized": True}, {"ROWS": 64}, ["serialized"]),
    ):
        assert kernel_of(made_up(**changes), config).verdict == verdict, (changes, config)


def test_a_share_is_of_whatever_takes_longest(scripts):
    from roofline import HZ, SMS, memory_share

    floors = {"copy_bytes_per_s": SMS * HZ * 16.0}  # 16 bytes per cycle and SM

    def share(**changes):
        return memory_share([kernel_of(made_up(**changes))], [16384], floors)

    # 4 programs move 64 KiB in 4096 cycles; 40 KiB take 2560.
    assert share() == 1.0
    assert share(issue=2048.0) == pytest.approx(4096 / 8192)
    assert share(programs=1) == pytest.approx(1024 / (2560 + 100))


def test_gemms_between_softmaxes_wait_for_them(scripts):
    from roofline import PEAK_FLOP, gemm_share

    def share(**changes):
        code = made_up(tensor=1000.0, issue=600.0, **changes)
        kernel = kernel_of(code, {"ROWS": 64, "COLUMNS": 64})
        return gemm_share([kernel], {"flop_per_s": PEAK_FLOP})

    assert share() == 1.0
    assert share(exponentials=400.0) == pytest.approx(0.5)


def test_what_was_measured_stands_beside_the_estimate(scripts, tmp_path):
    from roofline import estimates

    row = {"entry": "swiglu", "pass": "forward", "size": [32768, 5632], "dtype": "torch.bfloat16",
           "ms": {"mtcli": 0.3}, "of_copy": 0.87, "of_product": 0.0}  # fmt: skip
    record = {
        "device": "NVIDIA H200",
        "date": "2026-01-02",
        "copy_bytes_per_s": 4e12,
        "rows": [row],
    }
    code = kernel_of(made_up(issue=1.0), {"ROWS": 1, "COLUMNS": 2048})
    assert estimates([code], tmp_path)[-1].endswith("| 100% |  |")
    (tmp_path / "kernels-NVIDIA-H200-2026-01-02.json").write_text(json.dumps(record))
    lines = estimates([code], tmp_path)
    assert "a copy at 4.00 TB/s" in lines[2] and "NVIDIA H200, 2026-01-02" in lines[2]
    # 3 * 32768 * 5632 * 2 bytes
    assert lines[-1].startswith("| swiglu forward: a._b | 32768 x 5632 | 1,107 |")
    assert lines[-1].endswith("| 100% | 87% |")


@needs_triton
@slow("kernels of two architectures, 4 s")
def test_the_page_is_written_by_the_command_that_it_names(tmp_path):
    text = PAGE.read_text()
    command = re.search(r"`python (benchmarks/gpu/compile\.py [^`]*)`", text)[1]
    script, *flags = shlex.split(command)
    assert flags[-1] == str(PAGE.relative_to(ROOT))
    page, rows = tmp_path / "page.md", tmp_path / "rows.json"
    flags = [*flags[:-1], page, "--only", "swiglu 5632", "--json", rows, "--jobs", "1"]
    done = run(ROOT / script, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("sm_90 swiglu 5632 bf16 forward swiglu._forward")
    written = page.read_text()
    for head in re.findall(r"^#.*|^\| (?:case|kernels) \|.*", written, re.MULTILINE):
        assert head in text, "write the page again"
    assert "| swiglu forward: swiglu._forward | 32768 x 5632 |" in written
    kernels = json.loads(rows.read_text())["rows"]
    assert [(kernel["arch"], kernel["phase"]) for kernel in kernels] == [
        (90, "forward"), (90, "backward"), (80, "forward"), (80, "backward")
    ]  # fmt: skip


@needs_triton
def test_a_name_that_no_case_has_is_an_error_with_the_names_there_are(scripts, monkeypatch, capsys):
    import compile as script

    monkeypatch.setattr(sys, "argv", ["compile.py", "--only", "swigly"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as end:
        script.main()
    assert capsys.readouterr().out == ""
    assert "error: no case is named swigly\n\nhint: flash 128, flash 64" in str(end.value)
