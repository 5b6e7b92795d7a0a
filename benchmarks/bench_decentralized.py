"""Decentralized SGD: the bias of each method on quadratics, and loss over batch sizes on real text.

    python benchmarks/bench_decentralized.py bias
    python benchmarks/bench_decentralized.py text --data d/std --output DIR --plot FILE.png

`bias` trains 8 replicas on a ring by the methods' own class, with exact gradients, and prints how
far they end from the optimum beside the solution of the linear system that they end at. `text`
trains one small GPT with each method and batch size on the same samples, learning rates
proportional to the batch, by `mtcli train`, and prints the loss of the average model on the
validation part, over the first column's.
"""

import argparse
import json
import sys
from pathlib import Path

from arguments import Arguments, write_rows
from progress import each
from runs import metrics, mtcli, sets

TESTS = Path(__file__).parent.parent / "tests"
MOMENTA = (0.0, 0.5, 0.8, 0.9)
BIASED = ("decentlam", "dmsgd", "awc_dmsgd", "da_dmsgd")
TRAINED = ("all_reduce", "dmsgd", "decentlam")


def bias_rows(replicas: int, lr: float, steps: int) -> list[dict]:
    """The bias of each method and momentum, and by closed form."""
    sys.path[:0] = [str(TESTS), str(TESTS / "core" / "sync")]
    import numpy as np
    import quadratics
    from ranks import run_ranks

    from mtcli.core.exchange.topology import MixingGraph

    cases = [(method, "ring", b, lr) for method in BIASED for b in MOMENTA]
    ranks = run_ranks(replicas, quadratics.trained, cases, steps, deadline=3600.0)
    matrix = np.array(MixingGraph("ring", replicas).matrix())
    rows = []
    for case, (method, _, b, _) in enumerate(cases):
        found = quadratics.bias(np.stack([rank[case][-1] for rank in ranks]))
        kind = "dsgd" if not b and method != "awc_dmsgd" else method
        closed = quadratics.bias(quadratics.limit(kind, matrix, b, lr))
        rows.append({"method": method, "b": b, "bias": float(found), "closed": float(closed)})
    return rows


def bias_table(rows: list[dict]) -> str:
    """The bias of each method and momentum, and by closed form in brackets, in Markdown."""
    lines = ["| method | " + " | ".join(f"b = {b:g}" for b in MOMENTA) + " |"]
    lines += ["|---" * (1 + len(MOMENTA)) + "|"]
    for method in BIASED:
        cells = [f"{r['bias']:.4g} ({r['closed']:.4g})" for r in rows if r["method"] == method]
        lines.append("| " + " | ".join([method, *cells]) + " |")
    return "\n".join(lines)


def text_losses(options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """The validation loss of each method and batch size."""
    runs = [(method, size) for method in TRAINED for size in options.batches]
    found: dict[str, dict[int, float]] = {method: {} for method in TRAINED}
    for method, size in each(runs, lambda run: f"{run[0]} {run[1]}"):
        found[method][size] = _trained(options, method, size)
    return found


def _trained(options: argparse.Namespace, method: str, size: int) -> float:
    folder, steps = Path(options.output) / f"{method}-{size}", options.samples // size
    fields = {
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "model.num_heads": 4,
        "model.vocab_size": 257,
        "model.max_seq_len": 64,
        "batch.seq_len": 64,
        "batch.micro_batch_size": size // options.nproc,
        "batch.global_batch_size": size,
        "optimizer.name": "sgd",
        "optimizer.momentum": 0.9,
        "optimizer.lr": options.lr * size / options.batches[0],
        "optimizer.warmup_steps": steps // 10,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip": 0.0,
        "sync.method": method,
        "train.steps": steps,
        "train.eval_every": steps,
        "train.device": "cpu",
        "train.output": str(folder),
        "data.train": json.dumps([options.data]),
    }
    given = sets(f"{name}={value}" for name, value in fields.items())
    mtcli("train", "tiny", "--nproc", options.nproc, *given)
    return metrics(folder)[-1]["valid_loss"]


def text_table(losses: dict[str, dict[int, float]]) -> str:
    """The losses as a table in Markdown, with what each adds to the first method's."""
    first = losses[TRAINED[0]]
    rows = ["| method | " + " | ".join(f"batch {size}" for size in first) + " |"]
    rows += ["|---" * (1 + len(first)) + "|"]
    for method, found in losses.items():
        cells = [f"{loss:.3f} ({loss - first[size]:+.3f})" for size, loss in found.items()]
        rows.append("| " + " | ".join([method, *cells]) + " |")
    return "\n".join(rows)


def draw(losses: dict[str, dict[int, float]], path: Path) -> None:
    """Draws losses over batch sizes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.0, 3.2), layout="constrained")
    for method, found in losses.items():
        axes.plot(list(found), list(found.values()), marker="o", label=method)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(losses[TRAINED[0]]), [str(size) for size in losses[TRAINED[0]]])
    axes.set_xlabel("global batch, sequences")
    axes.set_ylabel("validation loss of the average, nats")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Parses the command line and prints a table."""
    parser = Arguments(__doc__, replicas=2, steps=20, nproc=2, samples=64, batches=[16])
    parser.add_argument("what", choices=("bias", "text"), nargs="?", default="bias")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--data", help="prefix of preprocessed text")
    parser.add_argument("--output", help="where run folders go")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--lr", type=float, default=0.025, help="of the smallest batch")
    options = parser.parse_args()
    if options.what == "bias":
        rows = bias_rows(options.replicas, 0.01, options.steps)
        print(bias_table(rows))
        return write_rows(options.json, rows)
    losses = text_losses(options)
    write_rows(options.json, losses)
    print(text_table(losses))
    if options.plot:
        draw(losses, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
