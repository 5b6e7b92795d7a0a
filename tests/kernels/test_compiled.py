"""What kernels compile to for an H100 that is not there: widths of accesses, registers, spills."""

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
import torch

from mtcli.kernels import adamw, cross_entropy, dropout, gelu, lamb, norm
from mtcli.kernels.cross_entropy import logits_gradient_, row_parts
from mtcli.kernels.launch import HAS_TRITON, TritonKernel
from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors, tensor_table

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


def updated(update_):
    """An update of two tensors, of which the second is at no multiple of 16 bytes."""
    masters = [torch.empty(64, 1024), torch.empty(1002)[1:]]
    gradients, m, v = ([torch.empty_like(x) for x in masters] for _ in range(3))
    weights = [x.to(torch.bfloat16) for x in masters]
    tensors = OptimizerTensors(masters, m, v, weights, [True] * 2)
    step = OptimizerStep(1e-4, (0.9, 0.95), 1e-8, 0.1, 3)
    update_(tensor_table(masters), tensors, gradients, step)


def one_step_of_adamw():
    updated(adamw.adamw_)


def one_step_of_lamb():
    def update_(table, tensors, gradients, step):
        lamb.lamb_moments_(table, tensors, gradients, step)
        lamb.lamb_step_(table, tensors, torch.ones(2), step)

    updated(update_)


def dropout_of_4096():
    dropout.dropout(torch.empty(4, 4096, dtype=torch.bfloat16), torch.arange(4), 2**60, 0.1)


def exact_gelu_of_4096():
    gelu.gelu(torch.empty(4, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16))


CASES = {
    cross_entropy: [loss_of_50257],
    norm: [layer_norm_of_4096],
    adamw: [one_step_of_adamw],
    lamb: [one_step_of_lamb],
    dropout: [dropout_of_4096],
    gelu: [exact_gelu_of_4096],
}


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


def test_an_update_takes_16_bytes_at_a_time_though_one_tensor_is_not_aligned(compiled):
    kernels = compiled["one_step_of_lamb"] | compiled["one_step_of_adamw"]
    for name in ("_adamw", "_moments", "_step"):
        assert kernels[name]["load_bits"] == kernels[name]["store_bits"] == 128, name


def test_dropout_and_exact_gelu_are_nearly_as_cheap_as_their_memory(compiled):
    """Of 132 SMs at 1.76 GHz and 4.3 TB/s, 28 instructions take as long as 4 bytes."""
    dropped = compiled["dropout_of_4096"]["_dropout"]["instructions"]
    exact = compiled["exact_gelu_of_4096"]["_forward"]["instructions"]
    assert dropped / 16 < 32 and exact / 16 < 32, "of 16 elements per thread"


def main():
    """Prints the facts of every case."""
    from mtcli.kernels.ahead_of_time import compiled_for

    found = {}
    for module, cases in CASES.items():
        kernels = [x for x in vars(module).values() if isinstance(x, TritonKernel)]
        for case in cases:
            with compiled_for("cuda", 90, 32, default_only=True):
                case()
            launched = [kernel for kernel in kernels if kernel.jitted.device_caches]
            found[case.__name__] = {k.function.__name__: facts(k) for k in launched}
            for kernel in launched:
                kernel.jitted.device_caches.clear()
    print(json.dumps(found))


def facts(kernel):
    """Widest accesses of global memory in bits, asynchronous copies, registers, spilled bytes."""
    from triton import knobs

    (caches,) = kernel.jitted.device_caches.values()
    (launch,) = caches[0].values()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.asm["cubin"])
        file.flush()
        commands = (
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            [knobs.nvidia.nvdisasm.path, "-c", file.name],
        )
        usage, code = (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for command in commands
        )
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    ptx = launch.asm["ptx"]
    copied = [8 * int(n, 0) for n in re.findall(r"cp\.async\.c\w\..*?(0x\w+)", ptx)]
    return {
        "load_bits": max([*accesses("ld", ptx), *copied]),
        "store_bits": max(accesses("st", ptx)),
        "copies": len(copied),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4}\*/ +(?!NOP)", code, re.M)),
        "registers": int(registers),
        "spilled": int(spilled),
    }


def accesses(kind, ptx):
    """Bits of each load or store of global memory."""
    pattern = kind + r"\.global[\w.:]*?(?:\.v(\d))?\.[bu](\d+)"
    return [int(n or 1) * int(bits) for n, bits in re.findall(pattern, ptx)]


if __name__ == "__main__":
    main()
