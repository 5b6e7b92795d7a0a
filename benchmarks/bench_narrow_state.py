"""What moments and sums of gradients in bfloat16 cost: held-out loss beside that of float32.

A small Llama trains in bf16 on the running Python's library sources, from the command line: `mtcli
sweep` runs every pair of `train.moments` and `train.gradients` with each seed, as arrays of models.
A step has 8 micro-batches, whose gradients are summed. Gaps are of equal seeds, which have equal
weights and data to begin with; intervals are those of 95 %.

    python benchmarks/bench_narrow_state.py --json FILE
    python benchmarks/bench_narrow_state.py --optimizer muon --seeds 5 --work FOLDER
    python benchmarks/bench_narrow_state.py --read FILE
"""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from arguments import Arguments, write_rows
from bench_optimizers import SIZES, sweep
from runs import SMALL, mtcli

BATCH = ("seq_len=128", "micro_batch_size=1", "global_batch_size=8")
RATES = {"adamw": "2e-3", "muon": "2e-2"}
FORMATS = ("fp32", "bf16")
# Of Student's distribution, by degrees of freedom.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}

Table = dict[str, Any]


def main() -> None:
    parser = Arguments(__doc__, steps=8, seeds=2)
    parser.add_argument("--optimizer", choices=RATES, default="adamw")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, choices=range(2, 9), default=3)
    parser.add_argument("--read", help="show losses that were written")
    parser.add_argument("--work", type=Path, help="keep the sweep here; the next run goes on")
    args = parser.parse_args()
    if args.read:
        found = json.loads(Path(args.read).read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(args.work or Path(folder), args)
    write_rows(args.json, found)
    report(found)


def measured(folder: Path, args: argparse.Namespace) -> Table:
    """The held-out losses of each setting, in the order of its seeds."""
    data, steps = folder / "stdlib", args.steps
    if not data.with_suffix(".json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        mtcli("preprocess", "stdlib", "--output", str(data), "--tokenizer", "bytes")
    settings = [f"model.{one}" for one in SIZES["tiny"]] + [f"batch.{one}" for one in BATCH]
    settings += [f'data.train=["{data}"]', f"train.steps={steps}", "train.device=cpu"]
    settings += [f"optimizer.name={args.optimizer}", f"optimizer.lr={RATES[args.optimizer]}"]
    settings += [f"optimizer.warmup_steps={steps // 20}", "optimizer.schedule=linear"]
    settings += [f"train.eval_every={steps}", "train.eval_batches=16", "train.precision=bf16"]
    settings += SMALL if args.tiny else ()
    vary = {"train.moments": FORMATS, "train.gradients": FORMATS}
    trials = sweep(folder / f"{args.optimizer}-state", settings, (*range(args.seeds),), vary)
    losses: dict[str, list[float]] = {}
    for moments, gradients in product(FORMATS, FORMATS):
        values = {"train.moments": moments, "train.gradients": gradients}
        rows = [trial for trial in trials if values.items() <= trial["values"].items()]
        rows.sort(key=lambda row: row["values"]["seed"])
        losses[f"{moments} moments, {gradients} gradients"] = [row["valid_loss"] for row in rows]
    return {"optimizer": args.optimizer, "steps": steps, "losses": losses}


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval)."""
    return mean(values), T_95[len(values) - 1] * stdev(values) / len(values) ** 0.5


def report(found: Table) -> None:
    """Prints a row for each setting, and its gap to the first one's losses of equal seeds."""
    losses = found["losses"]
    wide = next(iter(losses.values()))
    print(f"\n{found['optimizer']}, {found['steps']} steps, {len(wide)} seeds, nats per byte")
    print("| state | held-out loss | gap to fp32 |")
    print("|---|---|---|")
    for name, values in losses.items():
        loss, half = interval(values)
        gap, half_gap = interval([a - b for a, b in zip(values, wide, strict=True)])
        said = "" if values is wide else f"{gap:+.4f} ± {half_gap:.4f}"
        print(f"| {name} | {loss:.4f} ± {half:.4f} | {said} |")


if __name__ == "__main__":
    main()
