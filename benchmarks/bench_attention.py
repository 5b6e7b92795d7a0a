"""CPU attention of whole rows, ring blocks, packed documents and windows, beside torch's own.

Processor milliseconds of one forward and one backward, the best of several, values compared first.
GEMMs run here on Intel's CPUs too, for which kernels/limits.py chooses torch's kernel. Documents
are computed in groups of short ones, beside each alone by the same GEMMs ("one by one"). A window
is beside causal attention of the full row, by torch's kernel; the goal is a fourth of its time.

    python benchmarks/bench_attention.py --threads 1
"""

from collections.abc import Callable
from itertools import product
from time import process_time
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from arguments import Arguments, write_rows
from progress import each, say

from mtcli.core.mesh.visibility import Visibility
from mtcli.core.parallel.attention_mask import AttentionMask
from mtcli.core.parallel.context import attention_over
from mtcli.core.runtime.launch import ALLOCATOR, set_matmul
from mtcli.kernels.attention import attention as dispatch
from mtcli.kernels.attention import cpu
from mtcli.kernels.attention.attention import (
    attention,
    attention_backward,
    masked_sdpa,
    sdpa,
)

SHAPES = [(16, 4, 256, 64), (4, 12, 512, 64), (2, 12, 1024, 64)]  # batch, heads, tokens, width
BLOCKS = [(128, 128), (64, 128), (128, 64), (512, 512)]  # queries and keys that meet in a ring
DOCUMENTS = [20] * 12 + [16]  # tokens of the documents of a row
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def main() -> None:
    parser = Arguments(__doc__, repeats=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_matmul("fast")
    dispatch.CPU_ATTENTION_ROW_BYTES, dispatch.CPU_ATTENTION_LSE_ROW_BYTES = 2048, 512
    print(f"{args.threads} threads; {', '.join(ALLOCATOR)} as the environment has them")
    print(f"{'':30}{'torch':>14}{'mtcli':>14}{'ratio':>14}   forward, backward ms")
    rows = []
    cases = [*product((torch.float32, torch.bfloat16), SHAPES), *BLOCKS]
    for case in each(cases[-3:-1] if args.tiny else cases):
        rows.append((measure_block if case in BLOCKS else measure)(*case, args.repeats))
        pairs = (rows[-1][key] for key in ("torch", "mtcli"))
        cells = "".join(f"{f'{a:.1f}, {b:.1f}':>14}" for a, b in pairs)
        ratio = "{:.2f}, {:.2f}".format(*rows[-1]["ratio"])
        say(f"{rows[-1]['what']:30}{cells}{ratio:>14}")
    rows.append(measure_documents(DOCUMENTS, args.repeats))
    line = "{what:30}{one by one:14.1f}{grouped:14.1f}{ratio:14.2f}   one by one, grouped, ms"
    say(line.format(**rows[-1]))
    rows.append(measure_window(512 if args.tiny else 4096, 256, args.repeats))
    say("{what:30}{full:14.1f}{window:14.1f}{ratio:14.2f}   full, window, ms".format(**rows[-1]))
    write_rows(args.json, rows)


def measure(dtype: torch.dtype, shape: tuple[int, int, int, int], repeats: int) -> dict:
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, batch, tokens, heads, width, generator=generator).to(dtype)
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in qkv)
    functions = {
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "mtcli": lambda: sdpa(q, k, v, True),
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


def measure_block(queries: int, keys: int, repeats: int) -> dict:
    """A ring's block, 8 sequences of 4 heads: causal where queries and keys are one rank's."""
    generator, causal = torch.Generator().manual_seed(0), queries == keys
    q, grad = (torch.randn(8, 4, queries, 64, generator=generator) for _ in range(2))
    k, v = (torch.randn(8, 4, keys, 64, generator=generator) for _ in range(2))
    out, lse = _flash(q, k, v, 0.0, causal)
    torch.testing.assert_close(attention(q, k, v, causal), (out, lse), rtol=1e-4, atol=1e-4)
    functions = {
        "torch": (
            lambda: _flash(q, k, v, 0.0, causal),
            lambda: _flash_backward(grad, q, k, v, out, lse, 0.0, causal),
        ),
        "mtcli": (
            lambda: attention(q, k, v, causal),
            lambda: attention_backward(grad, (q, k, v, out), lse, causal),
        ),
    }
    best = {
        name: [min(1e3 * seconds(step) for _ in range(4 * repeats)) for step in steps]
        for name, steps in functions.items()
    }
    ratio = [a / b for a, b in zip(best["mtcli"], best["torch"], strict=True)]
    return {"what": f"ring block {queries} x {keys}", "ratio": ratio, **best}


def measure_documents(lengths: list[int], repeats: int) -> dict:
    """One row of documents, 4 heads of 64, forward and backward at once."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 1, 4, sum(lengths), 64, generator=generator)
    inputs = [x.requires_grad_() for x in qkv]
    masked_scores = {"one by one": 0, "grouped": cpu.MASKED_SCORES}
    outputs = {}
    best = dict.fromkeys(masked_scores, float("inf"))
    for name in [*masked_scores] * (4 * repeats):
        cpu.MASKED_SCORES = masked_scores[name]
        start = process_time()
        out = cpu.cpu_attention_of_documents(*inputs, True, lengths)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        best[name] = min(best[name], 1e3 * (process_time() - start))
        outputs[name] = out.detach()
    torch.testing.assert_close(outputs["grouped"], outputs["one by one"], rtol=1e-4, atol=1e-4)
    what = f"{len(lengths)} documents of {max(lengths)} tokens"
    return {"what": what, "ratio": best["grouped"] / best["one by one"], **best}


def measure_window(tokens: int, window: int, repeats: int) -> dict:
    """One row, 4 heads of 64, forward and backward at once."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 4, tokens, 64, generator=generator).requires_grad_() for _ in range(3)]
    alone = SimpleNamespace(size=1, rank=0)
    masking = {"full": AttentionMask(Visibility()), "window": AttentionMask(Visibility(window - 1))}
    masked = masked_sdpa(*inputs, masking["window"].mask(*[torch.arange(tokens)] * 2))
    best = dict.fromkeys(masking, float("inf"))
    for name in [*masking] * repeats:
        start = process_time()
        out = attention_over("ring")(*inputs, alone, masking[name])
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        best[name] = min(best[name], 1e3 * (process_time() - start))
    torch.testing.assert_close(out, masked, rtol=1e-4, atol=1e-4)
    what = f"a window of {window} in {tokens} tokens"
    return {"what": what, "ratio": best["window"] / best["full"], **best}


def seconds(function: Callable[[], object]) -> float:
    start = process_time()
    function()
    return process_time() - start


if __name__ == "__main__":
    main()
