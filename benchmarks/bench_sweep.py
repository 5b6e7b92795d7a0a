"""`mtcli sweep` of B learning rates beside B runs of `mtcli train`, by B.

Steps: an array's step and a run's alternate in one process; the quickest of each counts, and the
losses of every model are compared at every step. Whole: the same as command lines, process start
included, of which `--whole` runs a few: the runs one after another, and all at once.

    python benchmarks/bench_sweep.py                        # two layers of 64, steps alone
    python benchmarks/bench_sweep.py --model tiny --models 1,2,4
    python benchmarks/bench_sweep.py --whole --models 8 --steps 40
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from progress import say

# Overrides of the preset `tiny`, whose own sizes are hidden 256 and 2 x 2,048 tokens a step.
MODELS = {
    "small": "num_layers=2 hidden_size=64 num_heads=2 vocab_size=512 max_seq_len=64",
    "medium": "num_layers=4 hidden_size=128 num_heads=4 vocab_size=1024 max_seq_len=128",
    "tiny": "",
}
BATCHES = {"small": (64, 4, 4), "medium": (128, 4, 4), "tiny": (256, 8, 16)}
TOLERANCE = 1e-5  # float32, relative, of losses over the measured steps


def main() -> None:
    args = parse()
    if args.child:
        measure(args)
        return
    environ = os.environ | allocator()
    if args.whole:
        whole(args, environ)
        return
    words = [sys.executable, __file__, "--child", "1", "--model", args.model]
    words += ["--models", args.models, "--steps", str(args.steps), "--threads", str(args.threads)]
    sys.exit(subprocess.run(words, env=environ).returncode)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--models", default="1,2,4,8,16", help="B of each array")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--whole", action="store_true", help="command lines instead of steps")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def allocator() -> dict[str, str]:
    """The settings that the launcher gives every rank."""
    from mtcli.core.runtime.launch import ALLOCATOR

    return ALLOCATOR


def overrides(model: str, steps: int) -> list[str]:
    seq, micro, batch = BATCHES[model]
    found = [f"model.{word}" for word in MODELS[model].split()]
    found += [f"batch.seq_len={seq}", f"batch.micro_batch_size={micro}"]
    return [*found, f"batch.global_batch_size={batch}", f"train.steps={steps}"]


def measure(args: argparse.Namespace) -> None:
    """Alternates steps of one run after another with steps of arrays."""
    import resource

    import torch

    from mtcli.core.config.loading import load_config
    from mtcli.core.runtime.launch import Runtime, set_matmul
    from mtcli.core.sweep.array import ModelArray, array_groups
    from mtcli.core.sweep.batches import ArrayLoader
    from mtcli.core.training.loader import synthetic_loader
    from mtcli.core.training.state import initialise
    from mtcli.core.training.step import Trainer

    torch.set_num_threads(args.threads)
    set_matmul("fast")
    runtime = Runtime(0, 1, 0, 1, torch.device("cpu"))
    tokens = BATCHES[args.model][0] * BATCHES[args.model][2]
    say(f"{args.model}, {args.threads} threads: the quickest of {args.steps} steps, ms a model")
    names = ("models", "alone", "array", "ratio", "cpu", "tokens/s", "MiB")
    print("".join(f"{name:>10}" for name in names))
    for count in map(int, args.models.split(",")):
        rates = [f"optimizer.lr={1e-3 * (1 + i / count)}" for i in range(count)]
        configs = [load_config("tiny", [*overrides(args.model, 1000), rate]) for rate in rates]
        trainer = Trainer(configs[-1], runtime)
        initialise(trainer)
        array = ModelArray(configs, array_groups(configs[0], runtime))
        for member in array.members:
            initialise(member)
        alone = synthetic_loader(configs[-1], trainer.groups)
        shared = synthetic_loader(configs[0], array.groups)
        loader = ArrayLoader([shared] * count)
        best = dict.fromkeys(("alone", "array"), (9e9, 9e9))
        for number in range(args.steps):
            started = perf_counter(), process_time()
            wanted = trainer.train_step(alone)
            between = perf_counter(), process_time()
            made = array.train_step(loader)
            ended = perf_counter(), process_time()
            assert abs(made[-1].loss - wanted.loss) <= TOLERANCE * wanted.loss, (number, count)
            if number:  # the first ones allocate
                pairs = {"alone": (started, between), "array": (between, ended)}
                for name, (a, b) in pairs.items():
                    each = count if name == "array" else 1
                    taken = ((y - x) / each for x, y in zip(a, b, strict=True))
                    best[name] = tuple(map(min, best[name], taken))
        alone.close()
        shared.close()
        (wall, cpu), (own_wall, own_cpu) = best["alone"], best["array"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        rate = tokens / own_wall
        cells = (count, wall * 1e3, own_wall * 1e3, wall / own_wall, cpu / own_cpu, rate, peak)
        print("".join(f"{cell:10.6g}" for cell in cells), flush=True)


def whole(args: argparse.Namespace, environ: dict[str, str]) -> None:
    """Seconds of command lines: the sweep, its runs one after another, and all at once."""
    print(
        f"{'models':>6} {'sweep':>8} {'in turn':>8} {'at once':>8}  seconds, process start included"
    )
    for count in map(int, args.models.split(",")):
        with tempfile.TemporaryDirectory() as room:
            folder = Path(room)
            (folder / "text.txt").write_text("all the world is a stage\n" * 20_000)
            mtcli(
                folder, environ, "preprocess", "text.txt", "--output", "d", "--tokenizer", "bytes"
            )
            settings = [*overrides(args.model, args.steps), "data.train=d"]
            words = [word for one in settings for word in ("--set", one)]
            rates = [f"{1e-3 * (1 + i / count):.6g}" for i in range(count)]
            vary = ["--vary", f"optimizer.lr={','.join(rates)}", "--max-fused", str(count)]
            seconds = [timed(folder, environ, ["sweep", "tiny", *words, *vary, "--output", "out"])]
            runs = [
                ["train", "tiny", *words, "--set", f"optimizer.lr={rate}", "--set"]
                for rate in rates
            ]
            for how in ("turn", "once"):
                start = perf_counter()
                started = []
                for number, run in enumerate(runs):
                    one = spawn(folder, environ, [*run, f"train.output={how}/{number}"])
                    if how == "turn":
                        assert one.wait() == 0, run
                    started.append(one)
                assert all(one.wait() == 0 for one in started)
                seconds.append(perf_counter() - start)
            compare(folder, rates)
            print(f"{count:6} {seconds[0]:8.1f} {seconds[1]:8.1f} {seconds[2]:8.1f}", flush=True)


def compare(folder: Path, rates: list[str]) -> None:
    """The curves of the sweep's trials are those of the runs."""
    for number, rate in enumerate(rates):
        curves = [
            [json.loads(line)["loss"] for line in (path / "metrics.jsonl").open()]
            for path in (folder / "out" / f"lr={float(rate):g}", folder / "turn" / str(number))
        ]
        far = max(abs(a - b) / b for a, b in zip(*curves, strict=True))
        assert far < 1e-3, (rate, far)  # float32's rounding, over all steps


def timed(folder: Path, environ: dict[str, str], words: list[str]) -> float:
    start = perf_counter()
    assert spawn(folder, environ, words).wait() == 0, words
    return perf_counter() - start


def mtcli(folder: Path, environ: dict[str, str], *words: str) -> None:
    assert spawn(folder, environ, list(words)).wait() == 0, words


def spawn(folder: Path, environ: dict[str, str], words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mtcli", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, env=environ, **quiet)


if __name__ == "__main__":
    main()
