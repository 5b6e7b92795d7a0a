"""1-bit LAMB beside LAMB on real text, and what each of its ideas is worth: 4 replicas, by seed.

Every run trains the same small GPT on bytes of WikiText (MTCLI_TEST_DATA), or of the standard
library, from the command line. Told is the validation loss of the last steps; the bytes are those
that metrics.jsonl has. Writes JSON, and a plot for the docs.

    python benchmarks/bench_onebit.py --seeds 3
"""

import argparse
import json
import math
import os
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from arguments import Arguments, write_rows
from progress import each, say
from runs import metrics, mtcli, python, sets

RANKS, STEPS = 4, 300
MODEL = ["num_layers=2", "hidden_size=64", "num_heads=4", "vocab_size=257", "max_seq_len=64"]
SETTINGS = [f"model.{field}" for field in MODEL]
SETTINGS += ["batch.seq_len=64", "batch.micro_batch_size=8", "batch.global_batch_size=32"]
SETTINGS += ["optimizer.warmup_steps=20", "train.log_every=1000", "train.eval_batches=16"]
ONE_BIT, ADAM = ["sync.method=onebit"], ["optimizer.lr=0.003"]
# The best for LAMB of 0.03, 0.045 and 0.06; for 1-bit LAMB 0.02 and 0.03 are alike, 0.045 is worse.
LAMB = ["optimizer.name=lamb", "optimizer.lr=0.045"]
ONE_BIT_LAMB = ["optimizer.name=lamb", "optimizer.lr=0.03", *ONE_BIT]
VARIANTS = {  # name: (settings, attributes of OneBit)
    "LAMB": (LAMB, {}),
    "1-bit LAMB": (ONE_BIT_LAMB, {}),
    "without scaling": (ONE_BIT_LAMB, {"scales_updates": False}),
    "without feedback": (ONE_BIT_LAMB, {"keeps_errors": False}),
    "AdamW": (ADAM, {}),
    "1-bit Adam": ([*ADAM, *ONE_BIT], {}),
}


def main() -> None:
    args = parse()
    if args.child:
        train(args.child, args.settings)
        return
    rows: dict[str, list[dict[str, Any]]] = {}
    for path in args.read:
        rows |= json.loads(Path(path).read_text())
    with tempfile.TemporaryDirectory() as folder:
        wanted = [name for name in args.variants if name not in rows]
        data = preprocessed(Path(folder)) if wanted else []
        cases = [(name, seed) for seed in range(args.seeds) for name in wanted]
        for name, seed in each(cases, lambda case: f"{case[0]}, seed {case[1]}"):
            rows.setdefault(name, []).append(run(name, seed, data, args))
            say(f"{name:18} seed {seed}: {last(rows[name][-1]):.4f}")
    show(rows)
    write_rows(args.json, rows)
    if args.plot:
        draw(rows, Path(args.plot))


def parse() -> argparse.Namespace:
    parser = Arguments(__doc__, seeds=1, steps=20, variants=["LAMB", "1-bit LAMB"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--variants", type=lambda x: x.split(","), default=list(VARIANTS))
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--plot", help="draw the losses into this file")
    parser.add_argument("--read", action="append", default=[], help="rows that were measured")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def preprocessed(folder: Path) -> list[str]:
    """The settings of real text as bytes: WikiText where that is, else the standard library."""
    sources, given = {"train": "stdlib"}, os.environ.get("MTCLI_TEST_DATA")
    if given:
        at = Path(given) / "wikitext-103"
        sources = {"train": str(at / "wiki.test.tokens"), "valid": str(at / "wiki.valid.tokens")}
    for name, source in sources.items():
        mtcli("preprocess", source, "--output", folder / name, "--tokenizer", "bytes")
    return [f'data.{name}=["{folder / name}"]' for name in sources]


def run(name: str, seed: int, data: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """The losses of a run, and the bytes that its ranks sent."""
    with tempfile.TemporaryDirectory() as output:
        settings = [*SETTINGS, *VARIANTS[name][0], *data, f"seed={seed}", f"train.output={output}"]
        settings += [f"train.steps={args.steps}", f"train.eval_every={args.steps // 2}", *args.set]
        ranks = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
        python(*ranks, __file__, "--child", name, *settings)
        steps = metrics(Path(output))
    found: dict[str, Any] = {"loss": [round(step["loss"], 4) for step in steps]}
    found["sync_bytes"] = [step["sync_bytes"] for step in steps]
    return found | {"valid_loss": [x["valid_loss"] for x in steps if "valid_loss" in x]}


def last(row: dict[str, Any]) -> float:
    """The last validation loss; infinite where there is none that is a number."""
    loss = row["valid_loss"][-1]
    return math.inf if loss is None else loss


def show(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the losses of each variant: mean, spread over seeds, gap, and bytes."""
    print(f"{'':18}{'valid loss':>11}{'of seeds':>10}{'gap':>9}{'MB sent':>9}")
    for name, runs in rows.items():
        losses, exact = [last(run) for run in runs], "AdamW" if "Adam" in name else "LAMB"
        gaps = [ours - last(other) for ours, other in zip(losses, rows[exact], strict=True)]
        spread = stdev(losses) if len(losses) > 1 and max(losses) < math.inf else math.nan
        sent = mean(sum(run["sync_bytes"]) for run in runs) / 1e6
        print(f"{name:18}{mean(losses):11.4f}{spread:10.4f}{mean(gaps):9.4f}{sent:9.1f}")


def draw(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws training losses by step, and by bytes that were sent."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, runs in rows.items():
        if "Adam" in name:
            continue
        losses = [mean(x) for x in zip(*(run["loss"] for run in runs), strict=True)]
        smooth = [mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        sent = list(accumulate(x / 1e6 for x in runs[0]["sync_bytes"]))
        for panel, at in zip(panels, (range(1, len(smooth) + 1), sent), strict=True):
            panel.plot(at, smooth, label=name, lw=1.2)
    panels[0].set(xlabel="step", ylabel="training loss, nats per byte", ylim=(2.0, 5.6))
    panels[1].set(xlabel="MB sent by 4 ranks (log)", xscale="log")
    panels[0].legend()
    figure.savefig(path, dpi=110)


def train(name: str, settings: list[str]) -> None:
    """A rank of a run: `mtcli train`, with OneBit's attributes as a variant has them."""
    from mtcli.__main__ import main as run_line
    from mtcli.core.sync.onebit import OneBit

    for attribute, value in VARIANTS[name][1].items():
        setattr(OneBit, attribute, value)
    sys.argv = ["mtcli", "train", "tiny", *sets(settings)]
    run_line()


if __name__ == "__main__":
    main()
