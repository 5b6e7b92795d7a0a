"""CPU products of 16 bits by torch and in float32, and of float32 by torch's default and by oneDNN:
what `kernels/gemm.py` and `set_matmul` choose between. Then the gradients of weights, added to a
float32 sum in a pass after each product and by the product itself (`adds_to`).

GFLOP/s of a linear layer's forward product, of float32 its two gradients' as well, the best of
several, values compared first. Other CPUs can be played where oneDNN knows more instructions than
they have:

    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/bench_gemm.py
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from time import perf_counter

import torch
import torch.nn.functional as F
from arguments import Arguments, write_rows
from progress import each, say
from torch import Tensor

from mtcli.core.parallel.groups import Axis
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.sync.all_reduce import Bucket
from mtcli.kernels.gemm import (
    DEFAULT_GEMMS,
    add_weight_gradient_,
    adds_to,
    choose_gemm_dtype,
    runs_in_float32,
)

SHAPES = [(4096, 256, 1024), (2048, 768, 3072), (2048, 2048, 2048)]  # tokens, input, output
ALONE = Axis("data", (0,), 0, None, FlightRecorder())
SUMS = [*SHAPES, (512, 768, 3072), (64, 1024, 4096)]


def main() -> None:
    parser = Arguments(__doc__, repeats=1)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    choose_gemm_dtype()
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "all")
    name = torch.cpu.get_capabilities().get("cpu_name", "a CPU")
    print(f"{name}, {torch.get_num_threads()} threads, oneDNN with {isa} instructions; GFLOP/s")
    print(
        f"{'tokens, input, output':24}{'dtype':10}{'torch':>8}{'float32':>9}{'ratio':>7}   chosen"
    )
    rows = []
    shapes = [(64, 32, 32)] if args.tiny else SHAPES
    for dtype, shape in each([*product((torch.bfloat16, torch.float16), shapes)]):
        rows.append(row := measure(dtype, shape, args.repeats))
        rates = f"{row['torch']:8.0f}{row['float32']:9.0f}{row['float32'] / row['torch']:7.2f}"
        say(f"{row['shape']!s:24}{row['dtype']:10}{rates}   {row['chosen']}")
    print(f"{'tokens, input, output':24}{'product':10}{'torch':>8}{'oneDNN':>9}{'ratio':>7}")
    for shape in each(shapes):
        for row in measure_float32(shape, args.repeats):
            rates = f"{row['torch']:8.0f}{row['oneDNN']:9.0f}{row['oneDNN'] / row['torch']:7.2f}"
            say(f"{row['shape']!s:24}{row['product']:10}{rates}")
            rows.append(row)
    print(f"{'tokens, input, output':24}{'dtype':10}{'pass':>8}{'sink':>9}{'ratio':>7}   chosen")
    for dtype, shape in each(
        [*product((torch.float32, torch.bfloat16), shapes if args.tiny else SUMS)]
    ):
        rows.append(row := measure_sum(dtype, shape, args.repeats))
        rates = f"{row['pass']:8.0f}{row['sink']:9.0f}{row['sink'] / row['pass']:7.2f}"
        say(f"{row['shape']!s:24}{row['dtype']:10}{rates}   {row['chosen']}")
    write_rows(args.json, rows)


def measure(dtype: torch.dtype, shape: tuple[int, int, int], repeats: int) -> dict:
    tokens, inner, width = shape
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inner, generator=generator).to(dtype) for n in (tokens, width))
    ways = {
        "torch": lambda: F.linear(x, weight),
        "float32": lambda: F.linear(x.float(), weight.float()).to(dtype),
    }
    torch.testing.assert_close(ways["torch"](), ways["float32"](), rtol=2e-2, atol=2e-2)
    rates = quickest(ways, 2e-9 * tokens * inner * width, repeats)
    chosen = "float32" if runs_in_float32(x) else "torch"
    return {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "chosen": chosen} | rates


def measure_float32(shape: tuple[int, int, int], repeats: int) -> Iterator[dict]:
    """Yields a row for each product of a linear layer."""
    tokens, inner, width = shape
    x, weight, grad = (torch.randn(*s) for s in ((tokens, inner), (width, inner), (tokens, width)))
    products = {"forward": (x, weight.t()), "input's": (grad, weight), "weight's": (grad.t(), x)}

    def by(precision: str, a: Tensor, b: Tensor) -> Tensor:
        torch.set_float32_matmul_precision(precision)
        return a @ b

    for name, (a, b) in products.items():
        ways = {"torch": partial(by, "highest", a, b), "oneDNN": partial(by, "medium", a, b)}
        if (ways["torch"]() - ways["oneDNN"]()).norm() > 1e-5 * ways["torch"]().norm():
            say(f"oneDNN rounds the {name} product of {shape}")
        rates = quickest(ways, 2e-9 * tokens * inner * width, repeats)
        yield {"shape": shape, "dtype": "float32", "product": name} | rates


def measure_sum(dtype: torch.dtype, shape: tuple[int, int, int], repeats: int) -> dict:
    """The rates of a weight's gradient that is added to a float32 sum."""
    tokens, inner, width = shape
    grad, x = torch.randn(tokens, width).to(dtype), torch.randn(tokens, inner).to(dtype)
    bucket = Bucket({"w": (width, inner)}, ALONE, ALONE, torch.zeros(1))
    sink = bucket.sink("w", lambda: 1)
    wgrad = DEFAULT_GEMMS.wgrad
    ways = {
        "pass": lambda: bucket.put("w", wgrad(grad, x), first=False),
        "sink": lambda: add_weight_gradient_(sink, grad, x),
    }
    rates = quickest(ways, 2e-9 * tokens * inner * width, repeats)
    chosen = "sink" if adds_to(x, torch.float32) else "pass"
    return {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "chosen": chosen} | rates


def quickest(ways: dict[str, Callable[[], object]], gflop: float, repeats: int) -> dict[str, float]:
    """GFLOP/s of the quickest of a way's turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for way, multiply in ways.items():
            start = perf_counter()
            multiply()
            best[way] = min(best[way], perf_counter() - start)
    return {way: gflop / seconds for way, seconds in best.items()}


if __name__ == "__main__":
    main()
