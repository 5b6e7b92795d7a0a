"""DiLoCo beside data parallelism: loss of held-out text against the bytes that replicas send.

Four processes train the same small GPT with AdamW on the running Python's library sources, from
the same seed on the same samples. The loss is that of the average of replicas.

    python benchmarks/bench_diloco.py --plot docs/images/diloco.png
"""

import tempfile
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from arguments import Arguments, write_rows
from progress import each, say
from runs import metrics, mtcli, sets

RANKS = 4
MODEL = ["num_layers=4", "hidden_size=64", "num_heads=4", "vocab_size=257", "max_seq_len=64"]
BATCH = ["seq_len=64", "micro_batch_size=8", "global_batch_size=32"]
PERIODS = (1, 8, 32)
SPARSE = ("sync.top_k=0.03125", "sync.quantise=2", "sync.outer_lr=1.0")
RUNS = {
    "data parallel": (),
    **{f"DiLoCo H={period}": ("sync.method=diloco", f"sync.period={period}") for period in PERIODS},
    "local H=8": ("sync.method=local", "sync.period=8"),
    "DiLoCo H=32, 4 fragments, overlap 4, 4 bits": (
        "sync.method=diloco",
        "sync.period=32",
        "sync.fragments=4",
        "sync.overlap_steps=4",
        "sync.quantise=4",
    ),
    "SparseLoCo H=8, 3 %, 2 bits": ("sync.method=diloco", "sync.period=8", *SPARSE),
}


class Curve(NamedTuple):
    """Where the held-out loss of a run was measured, and what all ranks had sent by then."""

    steps: list[int]
    losses: list[float]
    bytes: list[int]


def main() -> None:
    parser = Arguments(__doc__, steps=16)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--plot", help="draw loss against bytes into this file")
    args = parser.parse_args()
    curves: dict[str, Curve] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "stdlib")
        mtcli("preprocess", "stdlib", "--output", data, "--tokenizer", "bytes")
        say(f"{'':44}{'bytes/step':>12}{'of DP':>9}{'loss':>8}{'- DP':>8}")
        for name in each(list(RUNS)[: 2 if args.tiny else None]):
            curves[name] = curve = train(
                data, RUNS[name], args.steps, args.lr, Path(folder) / "run"
            )
            plain, sent = curves["data parallel"], curve.bytes[-1]
            less = f"1/{plain.bytes[-1] / sent:.1f}"
            gap = curve.losses[-1] - plain.losses[-1]
            row = f"{name:44}{sent / args.steps:12,.0f}{less:>9}{curve.losses[-1]:8.3f}{gap:+8.3f}"
            say(row)
    write_rows(args.json, {k: c._asdict() for k, c in curves.items()})
    if args.plot:
        draw(curves, args.plot)


def train(data: str, sync: tuple[str, ...], steps: int, lr: float, output: Path) -> Curve:
    """Trains one run on all ranks and reads its metrics."""
    settings = [f"model.{one}" for one in MODEL] + [f"batch.{one}" for one in BATCH]
    settings += [f'data.train=["{data}"]', f"train.output={output}", f"train.steps={steps}"]
    settings += [f"train.eval_every={steps // 8}", "train.eval_batches=2", "train.device=cpu"]
    settings += [f"optimizer.lr={lr}", f"optimizer.warmup_steps={steps // 16}", *sync]
    mtcli("train", "tiny", "--nproc", RANKS, *sets(settings))
    rows = metrics(output)
    for file in sorted(output.rglob("*"), reverse=True):
        file.unlink() if not file.is_dir() else file.rmdir()
    sent = list(accumulate(row["sync_bytes"] for row in rows))
    measured = [i for i, row in enumerate(rows) if "valid_loss" in row]
    losses = [rows[i]["valid_loss"] for i in measured]
    return Curve([rows[i]["step"] for i in measured], losses, [sent[i] for i in measured])


def draw(curves: dict[str, Curve], path: str) -> None:
    """Loss against bytes on the left, against steps on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_bytes, by_steps = figure.subplots(1, 2, sharey=True)
    for name, curve in curves.items():
        sent = [count / 1e6 or float("nan") for count in curve.bytes]  # nothing has no logarithm
        line = {"marker": ".", "linewidth": 1, "label": name}
        by_bytes.plot(sent, curve.losses, **line)
        by_steps.plot(curve.steps, curve.losses, **line)
    by_bytes.set(xscale="log", xlabel="MB sent by all ranks", ylabel="held-out loss, nats per byte")
    by_steps.set(xlabel="steps")
    by_steps.legend(fontsize=8)
    for axes in (by_bytes, by_steps):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
