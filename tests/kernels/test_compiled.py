"""What kernels compile to for an H100 that is not there: widths of accesses, registers, spills."""

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
import torch

from mtcli.kernels import cross_entropy, norm
from mtcli.kernels.cross_entropy import logits_gradient_, row_parts
from mtcli.kernels.launch import HAS_TRITON, TritonKernel

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def loss_of_50257():
    """GPT-2's vocabulary, padded to a multiple of 128 as every table is."""
    logits, target = torch.empty(4, 50304, dtype=torch.bfloat16), torch.zeros(4).long()
    top, sums, _ = row_parts(logits, target, 50257)
    logits_gradient_(logits, top, target, sums, 50257)


def layer_norm_of_4096():
    x, weight = torch.empty(4, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    leaves = [y.requires_grad_() for y in (x, weight, weight.clone())]
    norm.layer_norm(*leaves, 1e-5).backward(torch.empty_like(x))


CASES = {cross_entropy: [loss_of_50257], norm: [layer_norm_of_4096]}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Of each case {kernel: facts}; compiled in a process that does not interpret kernels."""
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_logits_of_a_padded_vocabulary_are_read_16_bytes_at_a_time(compiled):
    kernels = compiled["loss_of_50257"]
    assert kernels["_row_parts"]["load_bits"] == 128
    assert kernels["_logits_gradient"]["load_bits"] == 128
    assert kernels["_logits_gradient"]["store_bits"] == 128


def test_a_norms_backward_prefetches_rows_and_leaves_registers_for_another_program(compiled):
    kernel = compiled["layer_norm_of_4096"]["_backward"]
    assert kernel["copies"] > 0
    assert kernel["registers"] <= 128 and kernel["spilled"] == 0


def main():
    """Prints the facts of every case."""
    from mtcli.kernels.ahead_of_time import compiled_for

    found = {}
    for module, cases in CASES.items():
        kernels = [x for x in vars(module).values() if isinstance(x, TritonKernel)]
        for case in cases:
            with compiled_for("cuda", 90, 32, default_only=True):
                case()
            found[case.__name__] = {k.function.__name__: facts(k) for k in kernels}
            for kernel in kernels:
                kernel.jitted.device_caches.clear()
    print(json.dumps(found))


def facts(kernel):
    """Widest accesses of global memory in bits, asynchronous copies, registers, spilled bytes."""
    from triton import knobs

    launches = [x for caches in kernel.jitted.device_caches.values() for x in caches[0].values()]
    if not launches:
        return {}
    (launch,) = launches
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    ptx = launch.asm["ptx"]
    copied = [8 * int(n, 0) for n in re.findall(r"cp\.async\.c\w\..*?(0x\w+)", ptx)]
    return {
        "load_bits": max([*accesses("ld", ptx), *copied]),
        "store_bits": max(accesses("st", ptx)),
        "copies": len(copied),
        "registers": int(registers),
        "spilled": int(spilled),
    }


def accesses(kind, ptx):
    """Bits of each load or store of global memory."""
    pattern = kind + r"\.global[\w.:]*?(?:\.v(\d))?\.[bu](\d+)"
    return [int(n or 1) * int(bits) for n, bits in re.findall(pattern, ptx)]


if __name__ == "__main__":
    main()
