"""Validation loss against bytes sent: LSGD and EASGD beside data parallelism, on real text.

Four processes train the same small GPT on Python's standard library, as bytes, by SGD with
Nesterov's momentum, from the command line: same data, seed and number of steps. Each strategy takes
the best of the learning rates. The loss is that of the average of workers. Bytes are those of
metrics.jsonl's sync_bytes, summed over ranks; what measuring sends is none of them.

    python benchmarks/bench_leaders.py --plot docs/images/leaders.png
"""

import shutil
import tempfile
from pathlib import Path

from arguments import Arguments, write_rows
from progress import each, say
from runs import metrics, mtcli, sets

MODEL = ["model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.vocab_size=257"]
MODEL += ["model.max_seq_len=64", "batch.seq_len=64"]
MODEL += ["batch.micro_batch_size=4", "batch.global_batch_size=16"]
SGD = ["optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true"]
SGD += ["optimizer.weight_decay=1e-4", "optimizer.warmup_steps=10"]
STRATEGIES = {
    "data parallelism": [],
    "LSGD 4, 16": ["sync.method=lsgd"],
    "LSGD 16, 64": ["sync.method=lsgd", "sync.period=16"],
    "LSGD 4, 16, asynchronous": ["sync.method=lsgd", "sync.asynchronous=true"],
    "EASGD 4": ["sync.method=easgd"],
    "EASGD 16": ["sync.method=easgd", "sync.period=16"],
}


def main() -> None:
    parser = Arguments(__doc__, steps=12, lr=[0.1])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--plot", help="draw them into this PNG")
    args = parser.parse_args()
    curves = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["stdlib", "--output", "text", "--tokenizer", "bytes"]
        mtcli("preprocess", *words, folder=folder)
        print(f"{'':26}{'lr':>6}{'valid':>8}{'MB sent':>9}{'share':>8}")
        for strategy in each(list(STRATEGIES)[: 2 if args.tiny else None]):
            runs = [(lr, curve(folder, strategy, lr, args.steps)) for lr in args.lr]
            lr, best = min(runs, key=lambda run: run[1][-1]["valid_loss"])
            curves[strategy] = {"lr": lr, "curve": best}
            sent, most = (curves[s]["curve"][-1]["bytes"] for s in (strategy, "data parallelism"))
            say(
                f"{strategy:26}{lr:6g}{best[-1]['valid_loss']:8.3f}{sent / 1e6:9.1f}"
                f"{sent / most:8.1%}"
            )
    write_rows(args.json, curves)
    if args.plot:
        draw(curves, Path(args.plot))


def curve(folder: Path, strategy: str, lr: float, steps: int) -> list[dict[str, float]]:
    """(step, validation loss, bytes sent until then) of a run, each time that it was evaluated."""
    every = max(1, steps // 15 // 4) * 4  # where asynchronous workers meet anyway
    run = [f"train.steps={steps}", f"train.eval_every={every}", "train.eval_batches=8"]
    run += ["train.output=run", "train.device=cpu", 'data.train=["text"]', f"optimizer.lr={lr}"]
    settings = [*MODEL, *SGD, *run, *STRATEGIES[strategy]]
    shutil.rmtree(folder / "run", ignore_errors=True)
    mtcli("train", "tiny", "--nproc", 4, *sets(settings), folder=folder)
    found, sent = [], 0
    for row in metrics(folder / "run"):
        sent += row["sync_bytes"]
        if "valid_loss" in row:
            found.append({"step": row["step"], "valid_loss": row["valid_loss"], "bytes": sent})
    return found


def draw(curves: dict[str, dict], path: Path) -> None:
    """Draws loss against steps, and against bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for strategy, one in curves.items():
        points = one["curve"]
        losses = [point["valid_loss"] for point in points]
        style = "--" if "asynchronous" in strategy else "-"
        line = {"marker": ".", "linestyle": style, "label": f"{strategy} (lr {one['lr']:g})"}
        by_step.plot([point["step"] for point in points], losses, **line)
        by_bytes.plot([point["bytes"] / 1e6 for point in points], losses, **line)
    by_step.set(xlabel="step", ylabel="validation loss of the average, nats per byte")
    by_bytes.set(xlabel="MB sent by all ranks", xscale="log")
    by_step.legend(fontsize=8)
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
