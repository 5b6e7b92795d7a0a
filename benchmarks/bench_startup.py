"""C11: how long a command takes to answer, beside the commands that people type today.

Every contender is a fresh process; they run in turn, and the least of the repeats counts. Goals:
`mtcli --help` within 120 ms, `mtcli plan` within 350 ms, and `mtcli train` at its first step within
0.6 s of what `import torch` alone takes.

    python benchmarks/bench_startup.py --repeats 10
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, sleep

from arguments import Arguments, write_rows
from progress import in_turn, say
from rich.console import Console
from rich.table import Table
from runs import sets

BIN = Path(sys.executable).parent
PYTHON = sys.executable
TINY = ["model.hidden_size=64", "model.vocab_size=512", "train.steps=1"]
OURS = ("mtcli --help", "mtcli plan tiny")
TRAIN = "mtcli train to its first step"
# fmt: off
CONTENDERS = {
    "python -c pass":       [PYTHON, "-c", "pass"],
    "import torch":         [PYTHON, "-c", "import torch"],
    "mtcli --help":         [str(BIN / "mtcli"), "--help"],
    "mtcli plan tiny":      [str(BIN / "mtcli"), "plan", "tiny"],
    "gigatoken --help":     [str(BIN / "gigatoken"), "--help"],
    "lm_eval --help":       [str(BIN / "lm_eval"), "--help"],
    "hf --help":            [str(BIN / "hf"), "--help"],
    "torchrun --help":      [str(BIN / "torchrun"), "--help"],
    "transformers --help":  [str(BIN / "transformers"), "--help"],
    "accelerate --help":    [str(BIN / "accelerate"), "--help"],
}
# fmt: on


def main() -> None:
    parser = Arguments(__doc__, repeats=1)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        milliseconds = measure(args, Path(folder))
    show(milliseconds)
    write_rows(args.json, milliseconds)


def prepare(folder: Path) -> None:
    """Tokens for the run whose first step is waited for."""
    text = folder / "text.txt"
    text.write_text("all the world is a stage " * 2000)
    command = [BIN / "mtcli", "preprocess", text, "--output", folder / "data", "--tokenizer"]
    subprocess.run([*command, "bytes"], check=True, capture_output=True)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Milliseconds of every repeat, by contender; those that are not installed are left out."""
    present = {name: argv for name, argv in CONTENDERS.items() if shutil.which(argv[0])}
    if args.tiny:
        present = {name: present[name] for name in ("import torch", *OURS)}
    found: dict[str, list[float]] = {name: [] for name in (*present, TRAIN)}
    for name in in_turn(found, args.repeats):
        found[name].append(1e3 * seconds_of(name, present, folder, len(found[name])))
        say(f"{name:30}{found[name][-1]:8.0f} ms")
    return found


def seconds_of(name: str, present: dict[str, list], folder: Path, turn: int) -> float:
    if name == TRAIN:
        return first_step_seconds(folder, folder / f"run-{turn}")
    start = perf_counter()
    subprocess.run(present[name], check=True, capture_output=True)
    return perf_counter() - start


def first_step_seconds(folder: Path, output: Path) -> float:
    """Seconds from the start of `mtcli train` until its first step is in metrics.jsonl."""
    metrics = output / "metrics.jsonl"
    data = json.dumps([str(folder / "data")])
    argv = [BIN / "mtcli", "train", "tiny", *sets(TINY), "--set", f"data.train={data}"]
    start = perf_counter()
    with subprocess.Popen(
        [*argv, "--set", f"train.output={output}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as run:
        while not (metrics.exists() and metrics.stat().st_size):
            if run.poll():
                raise SystemExit(run.stderr.read().decode())
            sleep(0.002)
        seconds = perf_counter() - start
        run.communicate()
    return seconds


def show(milliseconds: dict[str, list[float]]) -> None:
    ours = min(milliseconds["mtcli --help"])
    table = Table(title=f"C11: start-up, {os.cpu_count()} cores")
    for column in ("command", "min ms", "median ms", "x mtcli --help"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for name, all_ms in sorted(milliseconds.items(), key=lambda item: min(item[1])):
        low = min(all_ms)
        table.add_row(name, f"{low:.0f}", f"{statistics.median(all_ms):.0f}", f"{low / ours:.1f}")
    console = Console()
    console.print(table)
    limits = {
        "mtcli --help": 120,
        "mtcli plan tiny": 350,
        TRAIN: min(milliseconds["import torch"]) + 600,
    }
    for name, limit in limits.items():
        low = min(milliseconds[name])
        console.print(
            f"{name}: {low:.0f} ms of {limit:.0f}: {'met' if low <= limit else 'NOT met'}"
        )


if __name__ == "__main__":
    main()
