"""C7: tokens per second of two gloo ranks beside one process with two threads, on one CPU.

Every layout trains the same steps of the tiny preset from the command line; losses are compared
first. The best step counts, as other work on the machine only ever adds time.

    python benchmarks/bench_parallel.py --repeats 3
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from arguments import Arguments, write_rows
from progress import each, say
from runs import SMALL, metrics, mtcli, sets

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


def main() -> None:
    parser = Arguments(__doc__, repeats=1, steps=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        random = np.random.default_rng(0)
        tokens = (random.zipf(1.3, (400, 500)) % (512 if args.tiny else 8192)).astype(np.uint16)
        tokens.tofile(f"{data}.bin")
        write_index(Path(f"{data}.idx"), tokens.dtype, np.full(len(tokens), tokens.shape[1]))
        print(
            f"{'':6}{'1 process':>11}{'2 ranks':>9}{'ratio':>7}{'goal':>6}{'loss gap':>10}   tok/s"
        )
        rows = {}
        for name in each(list(LAYOUTS)[: 1 if args.tiny else None]):
            rows[name] = row = compare(name, data, args)
            say(
                f"{name:6}{row['one']:11,.0f}{row['two']:9,.0f}{row['ratio']:7.2f}"
                f"{row['goal']:6.2f}{row['loss_gap']:10.1e}"
            )
    write_rows(args.json, rows)


def compare(name: str, data: Path, args: argparse.Namespace) -> dict[str, float]:
    settings, layout, goal = LAYOUTS[name]
    best, losses = [0.0, 0.0], [[], []]
    small = SMALL if args.tiny else ()
    for _ in range(args.repeats):
        for ranks, extra in ((1, []), (2, layout)):
            steps = train(ranks, data, [*settings, *extra, f"train.steps={args.steps}", *small])
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
            f"train.output={output}/run",
            f'data.train=["{data}"]',
            "data.split=1,0,0",
        ]
        mtcli("train", "tiny", "--nproc", ranks, *sets(settings))
        return metrics(Path(output, "run"))


if __name__ == "__main__":
    main()
