"""C5 and C6: the CPU training step beside Hugging Face transformers and a plain torch GPT.

Every contender starts from the same weights and sees the same tokens; their losses are compared
first. Contenders run in turn, each run a process of its own, so that allocator settings count:
"default" is as shipped, "tuned" has our allocator variables and torch's `medium` product as well.

    python benchmarks/bench_train.py --model tiny --precision fp32 --repeats 5
    python benchmarks/bench_train.py --contenders ours,ours-compiled  # with train.compile
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from arguments import Arguments, lacking, threads, write_rows
from progress import in_turn, say
from runs import answer

sys.path.insert(0, str(Path(__file__).parent / "gpu"))  # contenders.py, which knows no device

SIZES = {  # layers, hidden, heads, vocabulary, tokens of a sequence, sequences of a step
    "nano": (4, 128, 4, 256, 128, 16),
    "tiny": (4, 256, 4, 8192, 256, 16),
    "124m": (12, 768, 12, 50257, 512, 4),
}
SIDE = 2048  # of the product that steps are compared with
LR, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0


def main() -> None:
    args = parse()
    if args.child:
        set_torch(args.child)
        print(json.dumps(run_child(args)))
        return
    rows = measure(args)
    show(args, rows)
    write_rows(args.json, rows)


def parse() -> argparse.Namespace:
    parser = Arguments(__doc__, model="nano", repeats=1, steps=1, contenders="ours,plain")
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="timed steps of a run")
    parser.add_argument("--contenders", default="ours,hf,plain,plain-tuned")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.steps = args.steps or (4 if args.model == "124m" else 20)
    return args


def measure(args: argparse.Namespace) -> dict[str, dict]:
    asked = args.contenders.split(",")
    missing = lacking({name: "transformers" for name in asked if name.startswith("hf")})
    contenders = [name for name in asked if name not in missing]
    rows: dict[str, dict] = {name: {"seconds": [], "first_step": []} for name in contenders}
    rates, (*_, seq, batch) = [], SIZES[args.model]
    for name in in_turn(["product", *contenders], args.repeats):
        found = spawn(args, name)
        if name == "product":
            rates.append(found["flop_per_s"])
            say(f"{'a product':14}{rates[-1] / 1e9:11,.0f} GFLOP/s")
            continue
        rows[name]["seconds"] += found["seconds"]
        rows[name]["first_step"].append(found["first_step"])
        rows[name]["losses"] = found["losses"]
        say(f"{name:14}{batch * seq / min(found['seconds']):11,.0f} tok/s best of this run")
    reference = rows[contenders[0]]["losses"]
    for name, row in rows.items():
        gaps = [abs(a - b) / a for a, b in zip(reference, row["losses"], strict=True)]
        row["largest_loss_gap"] = max(gaps)
        row["flop_per_s_of_a_product"] = max(rates)
        limit = 1e-5 if args.precision == "fp32" else 2e-2
        assert max(gaps) < limit, f"{name}: losses differ by {max(gaps):.1e}, not below {limit}"
    return rows | {name: {"skipped": why} for name, why in missing.items()}


def spawn(args: argparse.Namespace, name: str) -> dict:
    from mtcli.core.runtime.launch import ALLOCATOR

    env = dict(os.environ)
    if name.startswith(("ours", "product")) or name.endswith("-tuned"):
        env |= ALLOCATOR
    words = [f"--{flag}={getattr(args, flag)}" for flag in ("model", "precision", "steps")]
    return answer(__file__, "--child", name, *words, env=env)


def show(args: argparse.Namespace, rows: dict[str, dict]) -> None:
    layers, hidden, _, vocab, seq, batch = SIZES[args.model]
    ours = rows["ours"]
    rate = ours["flop_per_s_of_a_product"]
    print(
        f"\n{args.model}: {layers} layers of {hidden}, V {vocab}, {batch} x {seq} tokens, "
        f"{args.precision}, {os.cpu_count()} cores, {args.repeats} runs of {args.steps} steps; "
        f"a product of {SIDE}: {rate / 1e9:,.0f} GFLOP/s"
    )
    print(
        f"{'':14}{'tok/s best':>11}{'median':>9}{'of product':>11}{'ours/it: best':>15}"
        f"{'median':>9}{'first step':>12}{'loss gap':>10}"
    )
    flops = token_flops(args)
    for name, row in rows.items():
        if "skipped" in row:
            continue
        best, middle = (pick(row["seconds"]) for pick in (min, median))
        ratios = min(row["seconds"]) / min(ours["seconds"]), middle / median(ours["seconds"])
        tokens = batch * seq
        print(
            f"{name:14}{tokens / best:11,.0f}{tokens / middle:9,.0f}"
            f"{flops * tokens / best / rate:11.2f}{ratios[0]:15.2f}{ratios[1]:9.2f}"
            f"{min(row['first_step']):10.2f} s{row['largest_loss_gap']:10.1e}"
        )


def token_flops(args: argparse.Namespace) -> float:
    """3 forward passes, attention over the full square: goals' 6 N + 12 L d T."""
    from mtcli.core.plan.predict import MODEL

    described = config(args)
    return MODEL.token_flops(described.model, described.batch.seq_len)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def set_torch(name: str) -> None:
    """Threads and products of this process as a contender has them."""
    import torch

    from mtcli.core.runtime.launch import set_matmul

    torch.set_num_threads(threads())
    if name.startswith("ours"):
        set_matmul("fast")
    elif name.endswith("-tuned"):
        torch.set_float32_matmul_precision("medium")


def run_child(args: argparse.Namespace) -> dict:
    if args.child == "product":
        return {"flop_per_s": gemm_rate(args)}
    train = contender(args)
    losses, seconds = [], []
    for rows in batches(args, args.steps + 1):
        begin = perf_counter()
        losses.append(float(train(rows)))
        seconds.append(perf_counter() - begin)
    return {"losses": losses, "seconds": seconds[1:], "first_step": seconds[0]}


def gemm_rate(args: argparse.Namespace) -> float:
    """FLOP/s of a square product in the model's precision, by the quicker of torch's kernels."""
    import torch

    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    a, b = (torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(2))
    best = float("inf")
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        for _ in range(8):
            begin = perf_counter()
            a @ b
            best = min(best, perf_counter() - begin)
    return 2 * SIDE**3 / best


def contender(args: argparse.Namespace) -> Callable:
    """The training step of one contender: rows [b, s + 1] of tokens to their loss."""
    import contenders
    import torch

    make = {"ours": contenders.ours, "hf": contenders.hugging_face, "plain": contenders.plain}
    return make[args.child.partition("-")[0]](config(args), torch.device("cpu")).train


def config(args: argparse.Namespace):
    from mtcli.core.config.loading import config_of

    layers, hidden, heads, vocab, seq, batch = SIZES[args.model]
    model = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": vocab}
    model |= {"max_seq_len": seq, "activation": "gelu_tanh"}
    optimizer = {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY, "clip": CLIP}
    train = {"steps": args.steps + 1, "precision": args.precision}
    return config_of(
        {
            "model": model,
            "batch": {"seq_len": seq, "micro_batch_size": batch, "global_batch_size": batch},
            "optimizer": {**optimizer, "schedule": "constant"},
            "train": {**train, "compile": args.child == "ours-compiled"},
        }
    )


def batches(args: argparse.Namespace, steps: int) -> list:
    import torch

    _, _, _, vocab, seq, batch = SIZES[args.model]
    generator = torch.Generator().manual_seed(1)
    ranks = torch.arange(1, vocab + 1).double()
    words = torch.multinomial(1 / ranks, steps * batch * (seq + 1), True, generator=generator)
    return list(words.view(steps, batch, seq + 1))


if __name__ == "__main__":
    main()
