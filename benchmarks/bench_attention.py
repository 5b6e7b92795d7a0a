"""CPU causal attention: kernels/attention.py beside torch's scaled_dot_product_attention.

Processor milliseconds of one forward and one backward, the best of several, values compared first.

    python benchmarks/bench_attention.py --threads 1
"""

import argparse
import json
from pathlib import Path
from time import process_time

import torch
import torch.nn.functional as F

from mtcli.core.runtime import ALLOCATOR
from mtcli.kernels.attention import whole_attention

SHAPES = [(16, 4, 256, 64), (4, 12, 512, 64), (2, 12, 1024, 64)]  # batch, heads, tokens, width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("medium")
    rows = [
        measure(dtype, shape, args.repeats)
        for dtype in (torch.float32, torch.bfloat16)
        for shape in SHAPES
    ]
    print(f"{args.threads} threads; {', '.join(ALLOCATOR)} as the environment has them")
    print(f"{'':30}{'torch':>14}{'mtcli':>14}{'ratio':>14}   forward, backward ms")
    for row in rows:
        pairs = (row["torch"], row["mtcli"], row["ratio"])
        cells = "".join(f"{f'{a:.1f}, {b:.1f}':>14}" for a, b in pairs[:2])
        print(f"{row['what']:30}{cells}{'{:.2f}, {:.2f}'.format(*pairs[2]):>14}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


def measure(dtype: torch.dtype, shape: tuple[int, int, int, int], repeats: int) -> dict:
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, batch, tokens, heads, width, generator=generator).to(dtype)
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv)
    functions = {
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "mtcli": lambda: whole_attention(q, k, v, True),
    }
    tight = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(functions["mtcli"](), functions["torch"](), rtol=tight, atol=tight)
    best = {name: [float("inf")] * 2 for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = process_time()
            out = function()
            middle = process_time()
            out.backward(torch.ones_like(out))
            times = middle - start, process_time() - middle
            best[name] = [min(a, 1e3 * b) for a, b in zip(best[name], times, strict=True)]
    ratio = [a / b for a, b in zip(best["mtcli"], best["torch"], strict=True)]
    what = f"{list(shape)} {str(dtype).removeprefix('torch.')}"
    return {"what": what, "ratio": ratio, **best}


if __name__ == "__main__":
    main()
