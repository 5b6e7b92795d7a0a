"""The temporaries of CPU kernels, counted on fake tensors, beside those of the real kernels."""

from itertools import accumulate

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from mtcli.core.rehearse.cpu_kernels import CpuKernels
from mtcli.core.rehearse.live_memory import LiveMemory
from mtcli.kernels import fp8

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


def quantized(x, block, dtype=torch.float8_e4m3fn):
    return fp8.fp8_gemm(fp8.quantize(x, block, dtype), fp8.quantize(x, block, dtype))


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


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fake_kernel_takes_the_memory_of_the_real_one(name):
    real = allocated(OPERATIONS[name], tensors())
    assert counted(OPERATIONS[name]) == real


def allocated(operation, given):
    """The most bytes that torch's allocator had given out during an operation."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        operation(given)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(change for _, change in changes), default=0)


def counted(operation):
    live = LiveMemory()
    with FakeTensorMode(), live, CpuKernels():
        given = tensors()
        before = live.bytes
        live.begin()
        operation(given)
    return live.peak - before


def tensors():
    return {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
