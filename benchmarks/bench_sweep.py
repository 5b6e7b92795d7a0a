"""`mtcli sweep` of B learning rates beside B runs of `mtcli train` and beside torch's vmap, by B.

Steps: those of a run, of arrays and of a plain GPT under vmap, "tuned" with our allocator variables
and GEMMs, alternate in one process; vmap as it comes has a process after that. The quickest of each
counts, and an array's losses are compared with the run's at every step. Told are tokens a second of
all models together, and state with the peak of a step above it. Whole: the same as command lines,
process start included, of which `--whole` runs a few: the sweep, the runs one after another, and
all at once.

Arrays are as `mtcli sweep` makes them: one model each where those are quicker one after another,
which `--fused` overrides.

    python benchmarks/bench_sweep.py                        # two layers of 64, steps alone
    python benchmarks/bench_sweep.py --model tiny --models 1,2,4 --fused
    python benchmarks/bench_sweep.py --whole --models 8 --steps 40
    python benchmarks/bench_sweep.py --every --json benchmarks/results/sweep.json --markdown
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from arguments import Arguments
from plain_gpt import PlainGPT
from progress import say
from resident import peak_mib
from runs import mtcli, sets
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from mtcli.core.config.loading import load_config
from mtcli.core.runtime.atomic_writes import write_text
from mtcli.core.runtime.launch import ALLOCATOR, Runtime, set_matmul
from mtcli.core.sweep.array import ModelArray
from mtcli.core.sweep.batches import ArrayLoader
from mtcli.core.sweep.rules import trains_in_turn
from mtcli.core.training.loader import synthetic_loader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer, run_groups

# Overrides of the preset `tiny`, whose own sizes are hidden 256 and 2 x 2,048 tokens a step.
MODELS = {
    "mini": "num_layers=2 hidden_size=32 num_heads=2 vocab_size=256 max_seq_len=32",
    "small": "num_layers=2 hidden_size=64 num_heads=2 vocab_size=512 max_seq_len=64",
    "medium": "num_layers=4 hidden_size=128 num_heads=4 vocab_size=1024 max_seq_len=128",
    "long": "num_layers=2 hidden_size=64 num_heads=2 vocab_size=512 max_seq_len=512",
    "tiny": "",
}
BATCHES = {
    "mini": (32, 4, 4),
    "small": (64, 4, 4),
    "medium": (128, 4, 4),
    "long": (512, 1, 1),
    "tiny": (256, 8, 16),
}
ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
TOLERANCE = 1e-5  # float32, relative, of losses over the measured steps


# Of `--every`: model, B of each array, further flags.
EVERY: list[tuple[str, str, list[str]]] = [
    ("mini", "1,2,4,8,16", ["--contenders", "alone,array,vmap"]),
    ("small", "1,2,4,8,16", ["--contenders", "alone,array,vmap"]),
    ("tiny", "1", ["--contenders", "alone,array"]),  # of any B: arrays of one
    ("tiny", "2", ["--contenders", "alone,array", "--fused"]),
    ("mini", "8", []),
    ("small", "8", []),
    ("medium", "8", []),
    ("small", "8", ["--whole"]),
]


def main() -> None:
    args = parse()
    if args.child:
        measure(argparse.Namespace(**json.loads(args.child)))
        return
    for model, models, extra in EVERY if args.every else [(args.model, args.models, [])]:
        one = argparse.Namespace(**vars(args) | {"model": model, "models": models})
        run(one, extra)
    if args.markdown:
        print(markdown(json.loads(Path(args.json).read_text())))


def run(args: argparse.Namespace, extra: list[str]) -> None:
    """Runs one measurement, as a process for each environment or command lines."""
    if args.whole or "--whole" in extra:
        whole(args, os.environ | ALLOCATOR)  # as the launcher gives every rank
        return
    args = parse([*sys.argv[1:], "--model", args.model, "--models", args.models, *extra])
    asked = args.contenders.split(",")
    say(f"{args.model}, {args.threads} threads: the quickest of {args.steps} steps")
    rows = []
    for tuned in (True, False):
        names = [name for name in asked if CONTENDERS[name].tuned == tuned]
        if names:
            given = vars(args) | {"contenders": names, "tuned": tuned}
            words = [sys.executable, __file__, "--child", json.dumps(given, default=str)]
            child = subprocess.run(
                words, env=os.environ | (ALLOCATOR if tuned else {}), stdout=subprocess.PIPE
            )
            if child.returncode:
                sys.exit(child.returncode)
            rows += map(json.loads, child.stdout.splitlines())
    tell(args, rows)


def tell(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Prints the rows beside the run of its own and vmap as it comes, and keeps them."""
    seq, _, batch = BATCHES[args.model]
    names = ("tokens/s", "x alone", "cpu", "x vmap", "MiB")
    print(f"{'models':>6} {'contender':<20}" + "".join(f"{name:>10}" for name in names))
    found = {(row["B"], row["contender"]): row for row in rows}
    for (count, name), row in sorted(found.items(), key=lambda item: item[0][0]):
        alone = found[count, "alone"]
        vmapped = found.get((count, "vmap compiled" if "compiled" in name else "vmap"))
        ratios = [alone["wall"] / row["wall"], alone["cpu"] / row["cpu"]]
        ratios += [vmapped["cpu"] / row["cpu"] if vmapped else 0.0]
        cells = [seq * batch / row["wall"], *ratios, row["MiB"]]
        print(f"{count:6} {name:<20}" + "".join(f"{x:10.5g}" for x in cells))
        kept = {"model": args.model, "fused": args.fused, "B": count, "contender": name}
        kept |= dict(zip(names, (round(x, 3) for x in cells), strict=True))
        record(args, [*kept.items()][:4], kept)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(
        __doc__, models="2", steps=3, model="mini", contenders="alone,array", threads=1
    )
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--models", default="1,2,4,8,16", help="B of each array")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="alone among them")
    parser.add_argument("--set", nargs="*", default=[], help="fields of the config: lora.rank=8")
    parser.add_argument("--whole", action="store_true", help="command lines instead of steps")
    parser.add_argument("--fused", action="store_true", help="all models in one array")
    parser.add_argument(
        "--every", action="store_true", help="all that docs/reference/sweep.md tells"
    )
    parser.add_argument("--markdown", action="store_true", help="print the file's tables")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def overrides(model: str, steps: int) -> list[str]:
    seq, micro, batch = BATCHES[model]
    found = [f"model.{word}" for word in MODELS[model].split()]
    found += [f"batch.seq_len={seq}", f"batch.micro_batch_size={micro}"]
    return [*found, f"batch.global_batch_size={batch}", f"train.steps={steps}"]


class Alone:
    """A run of its own: B of them in turn take B times as long."""

    models = 1

    def __init__(self, configs: list[Any], compiled: bool) -> None:
        self.run = Trainer(configs[-1], ALONE)
        initialise(self.run)
        self.loader = synthetic_loader(configs[-1], self.run.groups)

    def step(self) -> float:
        return float(self.run.train_step(self.loader).loss)

    def state(self) -> int:
        return self.run.state_bytes()

    def close(self) -> None:
        self.loader.close()


class Array:
    """Ours: all models as one, or one of them where a sweep trains them in turn; the loss is that
    of the last."""

    def __init__(self, configs: list[Any], compiled: bool, fused: bool = False) -> None:
        if trains_in_turn(configs[0], "cpu") and not fused:
            configs = configs[-1:]
        if compiled:
            train = configs[0].train.model_copy(update={"compile": True})
            configs = [config.model_copy(update={"train": train}) for config in configs]
        self.models = len(configs)
        self.array = ModelArray(configs, run_groups(configs[0], ALONE))
        for member in self.array.members:
            initialise(member)
        self.loader = ArrayLoader([synthetic_loader(configs[0], self.array.groups)] * self.models)

    def step(self) -> float:
        return float(self.array.train_step(self.loader)[-1].loss)

    def state(self) -> int:
        return self.array.memory.bytes

    def close(self) -> None:
        self.loader.close()


class Vmap:
    """torch.func: the GPT that most people write, its parameters stacked, under vmap, with torch's
    fused AdamW; its losses are of other first weights."""

    def __init__(self, configs: list[Any], compiled: bool) -> None:
        model, self.batch = configs[0].model, configs[0].batch
        shape = model.num_layers, model.hidden_size, model.num_heads, model.vocab_size
        models = [PlainGPT(*shape, self.batch.seq_len) for _ in configs]
        self.models = len(models)
        parameters, _ = stack_module_state(models)
        self.parameters = {k: p.detach().requires_grad_() for k, p in parameters.items()}
        base = models[0].to("meta")

        def loss(parameters: dict[str, Tensor], rows: Tensor) -> Tensor:
            logits = functional_call(base, parameters, (rows[:, :-1],))
            return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

        call = vmap(loss, in_dims=(0, None))
        self.call = torch.compile(call) if compiled else call
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-3, fused=True)
        size = self.batch.global_batch_size, self.batch.seq_len + 1
        self.rows = torch.randint(model.vocab_size, size)

    def step(self) -> float:
        self.optimizer.zero_grad()
        parts = self.rows.split(self.batch.micro_batch_size)
        for rows in parts:
            # the other kernels of attention have no rule for vmap
            with sdpa_kernel(SDPBackend.MATH):
                losses = self.call(self.parameters, rows) / len(parts)
            losses.sum().backward()
        self.optimizer.step()
        return losses[-1].item()

    def state(self) -> int:
        return sum(4 * x.nbytes for x in self.parameters.values())  # with gradients and two moments

    def close(self) -> None:
        pass


class Contender(NamedTuple):
    make: Any
    compiled: bool
    tuned: bool  # has our allocator variables and GEMMs


CONTENDERS = {
    "alone": Contender(Alone, False, True),
    "array": Contender(Array, False, True),
    "array compiled": Contender(Array, True, True),
    "vmap": Contender(Vmap, False, False),
    "vmap compiled": Contender(Vmap, True, False),
    "vmap tuned": Contender(Vmap, False, True),
    "vmap compiled tuned": Contender(Vmap, True, True),
}


def measure(args: argparse.Namespace) -> None:
    """Alternates the steps of contenders that share an environment; prints a row of each."""
    torch.set_num_threads(args.threads)
    if args.tuned:
        set_matmul("fast")
    for count in map(int, args.models.split(",")):
        rates = [f"optimizer.lr={1e-3 * (1 + i / count)}" for i in range(count)]
        fixed = [*overrides(args.model, 1000), *args.set]
        configs = [load_config("tiny", [*fixed, rate]) for rate in rates]
        every = {}
        for name in args.contenders:
            make, compiled, _ = CONTENDERS[name]
            more = [args.fused] if make is Array else []
            every[name] = make(configs, compiled, *more)
        best = in_turns(every, args.steps)
        for name, one in every.items():
            row = {"B": count, "contender": name, "MiB": one.state() / 2**20 + peak_mib(one.step)}
            print(json.dumps(row | dict(zip(("wall", "cpu"), best[name], strict=True))), flush=True)
            one.close()


def record(args: argparse.Namespace, key: list[tuple[str, Any]], row: dict[str, Any]) -> None:
    """Puts a row into the file, in place of the one with the same key."""
    if not args.json:
        return
    path = Path(args.json)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [old for old in rows if any(old.get(field) != value for field, value in key)]
    cpu = torch.cpu.get_capabilities().get("cpu_name", "a CPU")
    row |= {"threads": args.threads, "steps": args.steps, "date": str(date.today())}
    told = {"cpu": cpu, "cores": os.cpu_count(), "torch": torch.__version__}
    write_text(path, json.dumps(told | {"rows": [*rows, row]}, indent=1) + "\n")


def markdown(found: dict[str, Any]) -> str:
    """The tables of docs/reference/sweep.md: processor time of B runs in turn over that of each
    contender, and seconds of command lines."""
    rows = [row for row in found["rows"] if "contender" in row]
    lines = [f"{found['cpu']}, {found['cores']} cores, torch {found['torch']}", ""]
    lines += [
        "| model | B | " + " | ".join(CONTENDERS) + " |",
        "|---|---" + "|---" * len(CONTENDERS) + "|",
    ]
    by_case: dict[tuple[str, bool, int], dict[str, float]] = {}
    for row in rows:
        case = by_case.setdefault((row["model"], row["fused"], row["B"]), {})
        case[row["contender"]] = row["cpu"]
    for (model, fused, count), of in by_case.items():
        cells = [f"{of[name]:.2f}" if name in of else "" for name in CONTENDERS]
        lines.append(f"| `{model}`{' fused' * fused} | {count} | {' | '.join(cells)} |")
    lines += ["", "| model | B | steps | sweep, s | in turn, s | at once, s |", "|---" * 6 + "|"]
    for row in found["rows"]:
        if "whole" in row:
            seconds = " | ".join(f"{row[how]:.1f}" for how in ("sweep", "in turn", "at once"))
            lines.append(f"| `{row['model']}` | {row['B']} | {row['steps']} | {seconds} |")
    return "\n".join(lines)


def in_turns(every: dict[str, Any], steps: int) -> dict[str, tuple[float, float]]:
    """(seconds, processor seconds) a model of each one's quickest step. Arrays' losses must be
    those of the run alone."""
    best = dict.fromkeys(every, (9e9, 9e9))
    for number in range(steps):
        wanted = 0.0
        for name, one in every.items():
            start = perf_counter(), process_time()
            loss = one.step()
            spent = perf_counter() - start[0], process_time() - start[1]
            wanted = wanted or loss
            far = abs(loss - wanted) / wanted
            assert "vmap" in name or far <= TOLERANCE, (number, name, loss, wanted)
            if number > 1:  # the first ones allocate and compile
                best[name] = tuple(map(min, best[name], (x / one.models for x in spent)))
    return best


def whole(args: argparse.Namespace, environ: dict[str, str]) -> None:
    """Seconds of command lines: the sweep, its runs one after another, and all at once."""
    print(
        f"{'models':>6} {'sweep':>8} {'in turn':>8} {'at once':>8}  seconds, process start included"
    )
    for count in map(int, args.models.split(",")):
        with tempfile.TemporaryDirectory() as room:
            folder = Path(room)
            (folder / "text.txt").write_text("all the world is a stage\n" * 20_000)
            words = ["text.txt", "--output", "d", "--tokenizer", "bytes"]
            mtcli("preprocess", *words, folder=folder, env=environ)
            words = sets([*overrides(args.model, args.steps), "data.train=d"])
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
            row = {"model": args.model, "B": count, "whole": True}
            named = zip(("sweep", "in turn", "at once"), seconds, strict=True)
            record(args, [*row.items()], row | {how: round(s, 2) for how, s in named})


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


def spawn(folder: Path, environ: dict[str, str], words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mtcli", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, env=environ, **quiet)


if __name__ == "__main__":
    main()
