"""The main job on the embedded corpus, as plain mtcli commands, and a table of what they measured.

Run by `make demo`. Everything is written to the folder `demo`, which is replaced.

python scripts/demo.py [--steps N]  # of training, divided by 3
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import mtcli
from mtcli.core.data.indexed import Indexed

DEMO = Path("demo")
RUN = "demo/run"
HELD_OUT = DEMO / "held-out.txt"


def main() -> None:
    """Runs the commands in turn, stops at the first that fails, and shows the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    start = time.perf_counter()
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    HELD_OUT.write_text(held_out_text())
    seconds = {name: run(command) for name, command in commands(steps).items()}
    table = Table("step", "seconds", "measured", title="What the demo measured")
    for name, measured in results(steps).items():
        table.add_row(name, f"{seconds[name]:.1f}", measured)
    Console(highlight=False).print("\n", table)
    say(f"wrote {', '.join(str(path) for path in sorted(DEMO.iterdir()))}")
    say(f"in {time.perf_counter() - start:.0f} s")


def commands(steps: int) -> dict[str, str]:
    """The command lines in order; the layout changes after two thirds of the steps."""
    common = (
        f"--set data.train=demo/stdlib --set train.output={RUN} --set optimizer.name=muon "
        f"--set optimizer.lr=1e-2 --set optimizer.other.lr=3e-3 "
        f"--set train.eval_every={steps // 3} --set optimizer.decay_steps={steps}"
    )
    first = f"{common} --set train.steps={steps // 3 * 2}"
    return {
        "preprocess": "preprocess stdlib --output demo/stdlib --tokenizer train:8192 "
        "--json demo/preprocess.json",
        "plan": "plan tiny --gpus 2 --device cpu --set parallel.tp=2 --json demo/plan.json",
        "train": f"train tiny --nproc 2 --set parallel.tp=2 {first}",
        "resume": f"train tiny --nproc 2 --set parallel.pp=2 {common} --set train.steps={steps} "
        "--resume",
        "plot": f"runs plot {RUN} --smooth 12 --output demo/loss.png",
        "shard": f"shard {RUN} demo/hf --to hf --verify",
        "eval": f"eval demo/hf --nproc 2 --set parallel.tp=2 --task wikitext103={HELD_OUT} "
        "--json demo/eval.json",
        "generate": "generate demo/hf --prompt 'def main(' --max-tokens 40",
        "profile": "profile tiny --nproc 2 --set parallel.pp=2 --steps 5 "
        "--report demo/report.html --json demo/profile.json",
    }


def held_out_text() -> str:
    """Source of mtcli's own, which no standard library has."""
    folder = Path(mtcli.__file__).parent / "core" / "mesh"
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))


def say(line: str) -> None:
    """Writes a line where the commands write theirs, before they do."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(command: str) -> float:
    """Runs one mtcli command line, printed first; returns its seconds."""
    say(f"\n$ mtcli {command}")
    start = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", "mtcli", *shlex.split(command)]).returncode
    if code:
        sys.exit(code)
    return time.perf_counter() - start


def results(num_steps: int) -> dict[str, str]:
    """A line on each command, from the files that they wrote."""
    read = {path.stem: json.loads(path.read_text()) for path in DEMO.glob("*.json")}
    steps = [json.loads(line) for line in (Path(RUN) / "metrics.jsonl").read_text().splitlines()]
    first, second = steps[: num_steps // 3 * 2], steps[num_steps // 3 * 2 :]
    held_out = read["eval"]["tasks"]["wikitext103"]
    profile, plan = read["profile"], read["plan"]
    return {
        "preprocess": f"{read['stdlib']['tokens']:,} tokens of Python's standard library",
        "plan": f"{plan['parameters']['total']:,} parameters, "
        f"{plan['memory_bytes']['total'] / 2**20:.0f} MiB on each of 2 ranks",
        "train": f"tp=2: loss {first[0]['loss']:.2f} -> {first[-1]['loss']:.2f}, {speed(first)}",
        "resume": f"pp=2: loss {second[0]['loss']:.2f} -> {second[-1]['loss']:.2f}, "
        f"{speed(second)}; held out {second[-1]['valid_loss']:.2f}, a unigram model "
        f"{unigram_loss():.2f}",
        "plot": "demo/loss.png: losses of both layouts over tokens",
        "shard": "one Hugging Face folder, logits and every bit compared",
        "eval": f"{held_out['bits_per_byte']:.2f} bits a byte of mtcli's own source, never seen",
        "generate": "40 tokens",
        "profile": f"mfu {profile['mfu']:.0%}, bubble {profile['bubble_fraction']['measured']:.0%} "
        f"(planned {profile['bubble_fraction']['planned']:.0%})",
    }


def speed(steps: list[dict[str, float]]) -> str:
    """The median speed of some steps."""
    return f"{np.median([step['tokens_per_second'] for step in steps]):,.0f} tokens/s"


def unigram_loss() -> float:
    """Nats a token of the held-out documents under the frequencies of all the others."""
    data = Indexed(DEMO / "stdlib")
    ends = np.cumsum(data.lengths)
    start, stop = (int(ends[round(share * len(ends)) - 1]) for share in (0.969, 0.999))
    tokens = np.asarray(data.tokens)
    counts = np.bincount(np.concatenate([tokens[:start], tokens[stop:]]), minlength=8192) + 1.0
    return float(-np.log(counts / counts.sum())[tokens[start:stop]].mean())


if __name__ == "__main__":
    main()
