"""1-bit LAMB beside LAMB on real text, and what each of its ideas is worth: 4 replicas, by seed.

Every run trains the same small GPT on bytes of WikiText (MTCLI_TEST_DATA), or of the standard
library, from the command line. Told is the validation loss of the last steps; the bytes are those
that metrics.jsonl has. Writes JSON, and a plot for the docs.

    python benchmarks/bench_onebit.py --seeds 3
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

from progress import each, say

RANKS, STEPS = 4, 400
MODEL = ["num_layers=2", "hidden_size=64", "num_heads=4", "vocab_size=257", "max_seq_len=64"]
SETTINGS = [f"model.{field}" for field in MODEL]
SETTINGS += ["batch.seq_len=64", "batch.micro_batch_size=8", "batch.global_batch_size=32"]
SETTINGS += ["optimizer.warmup_steps=20", "train.log_every=1000", "train.eval_batches=16"]
LAMB, ADAM = ["optimizer.name=lamb", "optimizer.lr=0.02"], ["optimizer.lr=0.003"]
ONE_BIT = ["sync.method=onebit"]
VARIANTS = {  # name: (settings, attributes of OneBit)
    "LAMB": (LAMB, {}),
    "1-bit LAMB": ([*LAMB, *ONE_BIT], {}),
    "without scaling": ([*LAMB, *ONE_BIT], {"_scales": "none"}),
    "without feedback": ([*LAMB, *ONE_BIT], {"_feeds_back": False}),
    "by element": ([*LAMB, *ONE_BIT], {"_scales": "element"}),
    "Adam": (ADAM, {}),
    "1-bit Adam": ([*ADAM, *ONE_BIT], {}),
    "Adam by element": ([*ADAM, *ONE_BIT], {"_scales": "element"}),
    "Adam without scaling": ([*ADAM, *ONE_BIT], {"_scales": "none"}),
}


def main() -> None:
    args = parse()
    if args.child:
        train(args.child, args.settings)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = preprocessed(Path(folder))
        cases = [(name, seed) for seed in range(args.seeds) for name in args.variants]
        rows: dict[str, list] = {name: [] for name in args.variants}
        for name, seed in each(cases, lambda case: f"{case[0]}, seed {case[1]}"):
            rows[name].append(run(name, seed, data, args))
            say(f"{name:22}{seed:3}{rows[name][-1]['valid_loss'][-1]:9.4f}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--variants", type=lambda x: x.split(","), default=list(VARIANTS))
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", help="write the rows to this file")
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
        command = ["preprocess", source, "--output", str(folder / name), "--tokenizer", "bytes"]
        subprocess.run([sys.executable, "-m", "mtcli", *command], check=True, capture_output=True)
    return [f'data.{name}=["{folder / name}"]' for name in sources]


def run(name: str, seed: int, data: list[str], args: argparse.Namespace) -> dict[str, list]:
    with tempfile.TemporaryDirectory() as output:
        settings = [*SETTINGS, *VARIANTS[name][0], *data, f"seed={seed}", f"train.output={output}"]
        settings += [f"train.steps={args.steps}", f"train.eval_every={args.steps // 4}", *args.set]
        ranks = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
        command = [sys.executable, *ranks, __file__, "--child", name, *settings]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        steps = [json.loads(line) for line in Path(output, "metrics.jsonl").open()]
        found = {key: [step[key] for step in steps] for key in ("loss", "sync_bytes")}
        return found | {"valid_loss": [x["valid_loss"] for x in steps if "valid_loss" in x]}


def train(name: str, settings: list[str]) -> None:
    """A rank of a run: `mtcli train`, with OneBit's attributes as a variant has them."""
    from mtcli.__main__ import main as mtcli
    from mtcli.core.sync.onebit import OneBit

    for attribute, value in VARIANTS[name][1].items():
        setattr(OneBit, attribute, value)
    flags = [part for setting in settings for part in ("--set", setting)]
    sys.argv = ["mtcli", "train", "tiny", *flags]
    mtcli()


if __name__ == "__main__":
    main()
