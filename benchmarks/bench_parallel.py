"""C7: tokens per second of two gloo ranks beside one process with two threads, on one CPU.

Every layout trains the same steps of the tiny preset from the command line; losses are compared
first. The best step counts, as other work on the machine only ever adds time.

    python benchmarks/bench_parallel.py --repeats 3
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from progress import each, say

from mtcli.core.data.indexed import write_index

MOE = ["model.architecture=mixtral", "model.ffn_hidden_size=512", "model.num_experts=8"]
LAYOUTS = {  # name: (settings of the run, of two ranks only, goal)
    "tp=2": ([], ["parallel.tp=2"], 0.85),
    "dp=2": ([], [], 1.05),
    # 8 micro-batches; the head costs as much as 2.7 layers, so the last stage gets fewer
    "pp=2": (
        ["batch.micro_batch_size=2"],
        ["parallel.pp=2", "parallel.stage_layers=[3,1]"],
        0.85,
    ),
    "cp=2": ([], ["parallel.cp=2"], 0.85),
    "ep=2": (MOE, ["parallel.ep=2"], 0.85),
}
STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        random = np.random.default_rng(0)
        tokens = (random.zipf(1.3, (400, 500)) % 8192).astype(np.uint16)
        tokens.tofile(f"{data}.bin")
        write_index(Path(f"{data}.idx"), tokens.dtype, np.full(len(tokens), tokens.shape[1]))
        print(
            f"{'':6}{'1 process':>11}{'2 ranks':>9}{'ratio':>7}{'goal':>6}{'loss gap':>10}   tok/s"
        )
        rows = {}
        for name in each(LAYOUTS):
            rows[name] = row = compare(name, data, args.repeats)
            say(
                f"{name:6}{row['one']:11,.0f}{row['two']:9,.0f}{row['ratio']:7.2f}"
                f"{row['goal']:6.2f}{row['loss_gap']:10.1e}"
            )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


def compare(name: str, data: Path, repeats: int) -> dict[str, float]:
    settings, layout, goal = LAYOUTS[name]
    best, losses = [0.0, 0.0], [[], []]
    for _ in range(repeats):
        for ranks, extra in ((1, []), (2, layout)):
            steps = train(ranks, data, [*settings, *extra])
            speed = max(step["tokens_per_second"] for step in steps[1:])
            best[ranks - 1] = max(best[ranks - 1], speed)
            losses[ranks - 1] = [step["loss"] for step in steps]
    gap = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    assert gap < 1e-5, f"{name}: losses differ by {gap:.1e}"
    return {
        "one": best[0],
        "two": best[1],
        "ratio": best[1] / best[0],
        "goal": goal,
        "loss_gap": gap,
    }


def train(ranks: int, data: Path, settings: list[str]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as output:
        settings = [
            *settings,
            f"train.steps={STEPS}",
            f"train.output={output}/run",
            f'data.train=["{data}"]',
            "data.split=1,0,0",
        ]
        flags = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "mtcli", "train", "tiny", "--nproc", str(ranks), *flags]
        subprocess.run(command, check=True, capture_output=True)
        return [json.loads(line) for line in Path(output, "run/metrics.jsonl").open()]


if __name__ == "__main__":
    main()
