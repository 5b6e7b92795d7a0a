"""Loss parity of float8: a small model trained in bf16, and in fp8 with each scaling.

Every run has the same seed, tokens and learning rates, so the curves differ by rounding alone; a
second bf16 run from another seed says how far apart curves lie by chance. The gap is that of the
mean loss over the last steps. On CPU float8 products are emulated: this measures numbers, not time.

    python benchmarks/fp8_parity.py wiki.txt --json fp8.json --png fp8.png

The text is any; docs/concepts/fp8.md has what WikiText-103's validation text gave. Each run resumes
from its folder under --work where it was cut off, and one that is done is read again.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from arguments import Arguments, write_rows
from runs import metrics, mtcli, sets

SCALINGS = ("rowwise", "blockwise", "tensorwise")
TAIL = 50  # steps whose mean is the final loss
GOAL = 0.5  # percent
WARMUP = 50  # steps; without, the first ones jump, in bf16 too, and each run elsewhere
MODEL = {
    "num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 257, "max_seq_len": 128,
}  # fmt: skip
BATCH = {"seq_len": 128, "micro_batch_size": 4, "global_batch_size": 4}


def main() -> None:
    parser = Arguments(__doc__, steps=2, runs="bf16,rowwise")
    parser.add_argument("text", nargs="?", default="stdlib", help="[the standard library]")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--work", type=Path, help="where runs are kept; a folder that goes away")
    parser.add_argument(
        "--runs",
        help="the first is what gaps are to",
        default="bf16,bf16 other seed,rowwise,blockwise,tensorwise",
    )
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        curves = trained(args, args.work or Path(folder))
    reference = curves[next(iter(curves))]
    rows = {name: row(curve, reference) for name, curve in curves.items()}
    show(rows)
    about = {"model": MODEL, "batch": BATCH, "steps": args.steps}
    write_rows(args.json, about | {"rows": rows, "losses": curves})
    if args.png:
        draw(curves, args.png)


def trained(args: argparse.Namespace, work: Path) -> dict[str, list[float]]:
    """The losses of each run, by name."""
    work.mkdir(parents=True, exist_ok=True)
    data = work / "data"
    if not data.with_suffix(".bin").exists():
        mtcli("preprocess", args.text, "--output", data, "--tokenizer", "bytes")
    return {name: losses(name, args.steps, work, data) for name in args.runs.split(",")}


def losses(name: str, steps: int, work: Path, data: Path) -> list[float]:
    """The loss of every step of a run, which is made unless its folder has it."""
    folder = work / name.replace(" ", "-")
    train: dict[str, object] = {"steps": steps, "output": str(folder), "precision": "bf16"}
    if name in SCALINGS:
        train |= {"precision": "fp8", "fp8_scaling": name}
    settings = {
        "seed": 4321 if "seed" in name else 1234,
        **{f"model.{k}": v for k, v in MODEL.items()},
        **{f"batch.{k}": v for k, v in BATCH.items()},
        **{f"train.{k}": v for k, v in train.items()},
        "optimizer.warmup_steps": min(WARMUP, steps),
        "data.train": json.dumps([str(data)]),
        "train.save_every": 100,
    }
    if not (folder / "checkpoints" / f"step-{steps:08d}").exists():
        resume = ["--resume"] if (folder / "checkpoints").exists() else []
        mtcli("train", "tiny", *sets(f"{k}={v}" for k, v in settings.items()), *resume)
    return [step["loss"] for step in metrics(folder)]


def row(curve: list[float], reference: list[float]) -> dict[str, float]:
    """The final loss, its gap to the reference in percent, and the largest gap of a step's loss."""
    final, first = (sum(c[-TAIL:]) / len(c[-TAIL:]) for c in (curve, reference))
    apart = [abs(a - b) / b for a, b in zip(curve, reference, strict=True)]
    return {
        "final_loss": final,
        "gap_percent": 100.0 * (final / first - 1.0),
        "largest_step_gap_percent": 100.0 * max(apart),
    }


def show(rows: dict[str, dict[str, float]]) -> None:
    print(f"| run | mean loss of the last {TAIL} steps | gap to the first | largest of a step |")
    print("|---|---|---|---|")
    for name, r in rows.items():
        gap, largest = r["gap_percent"], r["largest_step_gap_percent"]
        print(f"| {name} | {r['final_loss']:.4f} | {gap:+.2f} % | {largest:.2f} % |")
    missed = [s for s in SCALINGS if s in rows and abs(rows[s]["gap_percent"]) > GOAL]
    print(f"missed the goal of {GOAL} %: {', '.join(missed) or 'none'}")


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The curves, each step's mean over ten."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 5))).subplots()
    for name, curve in curves.items():
        ends = range(10, len(curve) + 1)
        axes.plot(ends, [sum(curve[i - 10 : i]) / 10 for i in ends], label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, mean of 10 steps")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
