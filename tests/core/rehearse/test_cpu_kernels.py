"""The temporaries of CPU kernels, counted on fake tensors, beside those of the real kernels."""

from itertools import accumulate

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from mtcli.core.rehearse.cpu_kernels import CpuKernels
from mtcli.core.rehearse.live_memory import LiveMemory
from mtcli.kernels import fp8
from mtcli.kernels.limits import IS_INTEL

ROWS, COLUMNS = 96, 256
SHAPES = {
    "wide": ((ROWS, COLUMNS), torch.float32),
    "double": ((ROWS, COLUMNS), torch.float64),
    "bf16": ((ROWS, COLUMNS), torch.bfloat16),
    "fp16": ((ROWS, COLUMNS), torch.float16),
    "column": ((ROWS, 1), torch.float32),
    "mask": ((ROWS, COLUMNS), torch.bool),
    "scalar": ((), torch.float32),
}


def quantized(x, block):
    operand = fp8.quantize(x, block, torch.float8_e4m3fn)
    return fp8.fp8_gemm(operand, operand)


OPERATIONS = {
    "a gradient added to a wider sum": lambda t: t["wide"].add_(t["bf16"]),
    "and to float64": lambda t: t["double"].add_(t["fp16"]),
    "a sum of one dtype": lambda t: t["wide"].add_(t["wide"]),
    "a product in the wider dtype": lambda t: t["fp16"] * t["wide"],
    "a product of rows": lambda t: t["bf16"] * t["column"],
    "a product of three dtypes": lambda t: torch.addcmul(t["double"], t["bf16"], t["wide"]),
    "a narrow tensor multiplied by a wider one": lambda t: t["fp16"].mul_(t["column"]),
    "a narrow tensor multiplied by a number": lambda t: t["fp16"].mul_(t["scalar"]),
    "a comparison": lambda t: t["bf16"] < t["wide"],
    "a copy": lambda t: t["bf16"].copy_(t["wide"]),
    "a masked tensor": lambda t: t["bf16"].masked_fill(t["mask"], 0.0),
    "a choice": lambda t: torch.where(t["mask"], t["fp16"], t["fp16"]),
    "float8 by rows": lambda t: quantized(t["bf16"], fp8.PER_ROW),
    "float8 by tensor": lambda t: quantized(t["bf16"], fp8.PER_TENSOR),
    "float8 by blocks": lambda t: quantized(t["bf16"], fp8.BLOCK_1X128),
}
GEMMS = {  # [..., M, K, N], and which of the operands are transposed
    "of activations and weight": ((300, 256, 200), "b"),
    "of a long sum": ((64, 2048, 512), "b"),
    "of the gradient of a weight": ((96, 512, 320), "a"),
    "of the gradient of a weight, of many tokens": ((256, 1024, 320), "a"),
    "of the gradient of activations": ((128, 384, 96), ""),
    "of both transposed": ((200, 96, 64), "ab"),
    "of few columns": ((64, 64, 16), "b"),
    "of heads": ((4, 256, 64, 256), "b"),
    "of the gradient of heads": ((4, 200, 300, 16), "a"),
}
PADDING = 36 * 2**10  # of 16 to 32 of 528 to 544 columns, in 256 rows, and of the result's sums


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fake_kernel_takes_the_memory_of_the_real_one(name):
    assert counted(OPERATIONS[name], tensors) == allocated(OPERATIONS[name], tensors())


def tensors():
    return {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


@pytest.fixture
def onednn(monkeypatch):
    """Has oneDNN multiply float32 too, in the blocks of AMD's AVX-512."""
    if IS_INTEL or not torch.cpu.get_capabilities().get("avx512_bf16"):
        pytest.skip("other CPUs have other blocks")
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GEMMS)
def test_a_fake_gemm_takes_onednns_blocks(name, dtype, onednn):
    (*heads, m, k, n), transposed = GEMMS[name]

    def operand(letter, rows, columns):
        if letter in transposed:
            return torch.ones(*heads, columns, rows, dtype=dtype).mT
        return torch.ones(*heads, rows, columns, dtype=dtype)

    def operands():
        return operand("a", m, k), operand("b", k, n)

    real = allocated(lambda ab: ab[0] @ ab[1], operands())
    assert 0 <= real - counted(lambda ab: ab[0] @ ab[1], operands) <= PADDING


def test_a_gemm_copies_operands_with_gaps(onednn):
    def halves():
        return torch.ones(4, 96, 256).chunk(2, -1)

    real = allocated(lambda ab: torch.bmm(ab[0], ab[1].mT), halves())
    assert 0 <= real - counted(lambda ab: torch.bmm(ab[0], ab[1].mT), halves) <= PADDING


def allocated(operation, given):
    """The most bytes that torch's allocator had given out during an operation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        operation(given)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(change for _, change in changes), default=0)


def counted(operation, make):
    """The same of fake kernels, by the tensors that they allocate."""
    live = LiveMemory()
    kernels = CpuKernels(torch.get_num_threads(), (torch.bfloat16, torch.float32))
    with FakeTensorMode(), live, kernels:
        given = make()
        before = live.bytes
        live.begin()
        operation(given)
    return live.peak - before
