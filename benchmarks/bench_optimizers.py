"""Muon beside AdamW, each tuned: steps to a loss of held-out text, from the command line.

Small Llamas train on the running Python's library sources. `mtcli sweep` tunes the learning rate
and weight decay of each optimizer, and AdamW's betas and Muon's momentum; the best settings train
with three further seeds. The loss to reach is the one that AdamW ends with at the same seed.
A grid whose best rate lies at its end grows there, by a factor of 2. `mtcli profile` measures the
seconds of a step of each, one after the other, beside those that `mtcli plan` expects.

    python benchmarks/bench_optimizers.py --size tiny --plot docs/images/optimizers-tiny.png
    python benchmarks/bench_optimizers.py --size 10m --like FILE --json OTHER --work FOLDER
    python benchmarks/bench_optimizers.py --read FILE

`--like` starts from the best of a smaller size: its betas and momentum, and rates from a
quarter of its own to twice.
A run goes on with the optimizers of its `--json`, and with the sweeps of its `--work`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from arguments import Arguments, write_rows
from progress import each, say
from runs import SMALL, metrics, mtcli, sets

SIZES = {
    "tiny": (
        *("num_layers=4", "hidden_size=128", "num_heads=4", "ffn_hidden_size=344"),
        *("vocab_size=257", "max_seq_len=128", "architecture=llama", "activation=swiglu"),
    ),
    "10m": (
        *("num_layers=8", "hidden_size=320", "num_heads=5", "ffn_hidden_size=864"),
        *("vocab_size=257", "max_seq_len=128", "architecture=llama", "activation=swiglu"),
    ),
}
BATCH = ("seq_len=128", "micro_batch_size=8", "global_batch_size=8")
RATES = {"adamw": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), "muon": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)}
DECAYS = (0.03, 0.1)
# Of the settings that no array of models can differ in, one sweep each.
SHAPES = {
    "adamw": ("optimizer.betas=[0.9, 0.95]", "optimizer.betas=[0.9, 0.99]"),
    "muon": ("optimizer.momentum=0.95", "optimizer.momentum=0.9"),
}
EVALUATIONS, SEEDS, TUNING_SEED = 20, (1, 2, 3), 0
T_95 = 4.303  # of Student's distribution with two degrees of freedom

Curve = list[tuple[int, float]]  # (step, held-out loss)
Table = dict[str, Any]
Grid = tuple[tuple[str, ...], tuple[float, ...]]  # shapes and rates


def main() -> None:
    parser = Arguments(__doc__, steps=20)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", help="draw the curves into this file")
    parser.add_argument("--read", help="show curves that were written")
    parser.add_argument("--like", help="tune around the best shapes of this file")
    parser.add_argument("--work", type=Path, help="keep the sweeps here; the next run goes on")
    args = parser.parse_args()
    if args.read:
        found = json.loads(Path(args.read).read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(args.work or Path(folder), args)
    write_rows(args.json, found)
    report(found)
    if args.plot:
        draw(found, args.plot)


def measured(folder: Path, args: argparse.Namespace) -> Table:
    """The best settings of each optimizer, and the curves of its seeds."""
    data, size, steps = folder / "stdlib", args.size, args.steps
    if not data.with_suffix(".json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        mtcli("preprocess", "stdlib", "--output", str(data), "--tokenizer", "bytes")
    common = [f"model.{one}" for one in SIZES[size]] + [f"batch.{one}" for one in BATCH]
    common += [f'data.train=["{data}"]', f"train.steps={steps}", "train.device=cpu"]
    common += [f"optimizer.warmup_steps={steps // 20}", "optimizer.schedule=linear"]
    common += [f"train.eval_every={steps // EVALUATIONS}", "train.eval_batches=4"]
    common += SMALL if args.tiny else ()
    seeds = SEEDS[:2] if args.tiny else SEEDS
    found: Table = {"size": size, "steps": steps, "optimizers": {}}
    if args.json and Path(args.json).exists():
        found = json.loads(Path(args.json).read_text())
    if (found["size"], found["steps"]) != (size, steps):
        raise SystemExit(f"error: {args.json} has another size or number of steps")
    grids: dict[str, Grid] = {name: (SHAPES[name], RATES[name]) for name in RATES}
    if args.like:
        smaller = json.loads(Path(args.like).read_text())["optimizers"]
        grids = {name: around(smaller[name]["best"]) for name in RATES}
    for name in each([name for name in RATES if name not in found["optimizers"]]):
        settings = [*common, f"optimizer.name={name}"]
        best = tuned(folder, name, settings, grids[name], args.tiny)
        values = [f"{field}={value}" for field, value in best["values"].items()]
        rows = sweep(folder / f"{name}-seeds", [*settings, best["shape"], *values], seeds)
        curves = [curve(Path(row["folder"])) for row in rows]
        found["optimizers"][name] = {"best": best, "curves": curves}
        write_rows(args.json, found)
    if all("seconds" in result for result in found["optimizers"].values()):
        return found
    for name in each(list(RATES)):  # all together, as a machine's speed changes
        settings = [*common, f"optimizer.name={name}", found["optimizers"][name]["best"]["shape"]]
        found["optimizers"][name]["seconds"] = step_seconds(folder, settings)
    return found


def step_seconds(folder: Path, settings: list[str]) -> Table:
    """A step's seconds, measured and planned."""
    path = folder / "profile.json"
    mtcli("profile", "tiny", *sets(settings), "--json", str(path))
    figures = json.loads(path.read_text())["figures"]["step_seconds"]
    return {kind: figures[kind] for kind in ("measured", "planned")}


def around(best: Table) -> Grid:
    """The shape of the best trial of a smaller size, and rates around its own."""
    rate = best["values"]["optimizer.lr"]
    return (best["shape"],), (rate / 4, rate / 2, rate, 2 * rate)


def tuned(folder: Path, name: str, settings: list[str], grid: Grid, tiny: bool) -> Table:
    """The trial with the lowest held-out loss at its end."""
    most = 1 if tiny else None  # of each field's values
    shapes, rates = grid[0][:most], grid[1][:most]

    def tried(output: str, shape: str, rates: tuple[float, ...]) -> list[Table]:
        vary = {"optimizer.lr": rates, "optimizer.weight_decay": DECAYS[:most]}
        rows = sweep(folder / output, [*settings, shape], (TUNING_SEED,), vary)
        for row in rows:
            del row["values"]["seed"]
        return [
            {"shape": shape, "values": row["values"], "valid_loss": row["valid_loss"]}
            for row in rows
            if row["status"] == "finished"
        ]

    def lowest() -> Table:
        return min(trials, key=lambda trial: trial["valid_loss"] or float("inf"))

    trials: list[Table] = []
    for number, shape in enumerate(shapes):
        trials += tried(f"{name}-tuning-{number}", shape, rates)
    while (rate := lowest()["values"]["optimizer.lr"]) in (rates[0], rates[-1]) and not tiny:
        beyond = rate / 2 if rate == rates[0] else rate * 2
        rates = tuple(sorted((*rates, beyond)))
        trials += tried(f"{name}-tuning-{beyond:g}", lowest()["shape"], (beyond,))
    best = lowest()
    say(f"{name}: {best['shape']}, {best['values']}: {best['valid_loss']:.4f}")
    return {**best, "trials": trials}


def sweep(
    output: Path,
    settings: list[str],
    seeds: tuple[int, ...],
    vary: Table | None = None,
) -> list[Table]:
    """The trials of `mtcli sweep`, unless an earlier run of this script has them."""
    words = sets(settings)
    varied = {**(vary or {}), "seed": seeds}
    for field, values in varied.items():
        words += ["--vary", f"{field}={','.join(map(str, values))}"]
    result = output.parent / f"{output.name}.json"
    if not result.exists():
        words += ["--resume"] * (output / "sweep.json").exists()
        partial = result.with_suffix(".partial")
        mtcli("sweep", "tiny", *words, "--output", str(output), "--json", str(partial))
        partial.replace(result)
    trials: list[Table] = json.loads(result.read_text())["trials"]
    return trials


def curve(folder: Path) -> Curve:
    """The held-out losses of a run."""
    return [(row["step"], row["valid_loss"]) for row in metrics(folder) if "valid_loss" in row]


def steps_to(losses: Curve, target: float) -> float:
    """The step at which a curve reaches a loss, between evaluations on a straight line; infinity
    where it does not."""
    before = losses[0]
    for step, loss in losses:
        if loss <= target:
            share = (before[1] - target) / (before[1] - loss) if before[1] > loss else 1.0
            return before[0] + share * (step - before[0])
        before = (step, loss)
    return float("inf")


def interval(values: list[float]) -> str:
    """The mean and its 95 % interval."""
    half = T_95 * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.4g} +- {half:.2g}"


def report(found: Table) -> None:
    """Prints a row for each optimizer."""
    optimizers = found["optimizers"]
    targets = [losses[-1][1] for losses in optimizers["adamw"]["curves"]]
    print(f"\n{found['size']}, {found['steps']} steps")
    columns = ["optimizer", "settings", "held-out loss at the end", "steps to AdamW's"]
    columns += ["of its steps", "seconds of a step, of AdamW's", "planned"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    adamw = optimizers["adamw"]["seconds"]
    for name, result in optimizers.items():
        best, curves = result["best"], result["curves"]
        values = [f"{key.partition('.')[2]} {value:g}" for key, value in best["values"].items()]
        ends = interval([losses[-1][1] for losses in curves])
        steps = [steps_to(*pair) for pair in zip(curves, targets, strict=True)]
        reached = [step for step in steps if step < float("inf")]
        said = (
            interval(reached)
            if len(reached) == len(steps)
            else f"{len(reached)} of {len(steps)} reach it"
        )
        share = f"{mean(reached) / found['steps']:.2f}" if len(reached) == len(steps) else ""
        shape = best["shape"].partition(".")[2]
        costs = [f"{result['seconds'][kind] / adamw[kind]:.2f}" for kind in ("measured", "planned")]
        row = [name, ", ".join([shape, *values]), ends, said, share, *costs]
        print(f"| {' | '.join(row)} |")


def draw(found: Table, path: str) -> None:
    """Held-out loss against steps, a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, (name, result) in zip(("C0", "C1"), found["optimizers"].items(), strict=True):
        for number, losses in enumerate(result["curves"]):
            label = name if number == 0 else None
            steps, values = zip(*losses, strict=True)
            axes.plot(steps, values, color=color, linewidth=1, label=label)
    target = mean(losses[-1][1] for losses in found["optimizers"]["adamw"]["curves"])
    axes.axhline(target, color="0.5", linewidth=0.8, linestyle="--")
    axes.set(xlabel="steps", ylabel="held-out loss, nats per byte", ylim=(None, 3.0))
    axes.set_title(f"{found['size']}: three seeds each, both tuned")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
