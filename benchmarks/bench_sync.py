"""Every strategy of data parallelism on the same small GPT, data and seeds, on 4 processes.

Loss, bytes on the wire, and seconds of a step over links of several speeds, beside what plan
predicts for each. Links are made with network namespaces and tc (slow_links.py), so those columns
need Linux, root and iproute2; without, they are left out and it says so.

    python benchmarks/bench_sync.py --steps 200 --json FILE --plot docs/images/sync.png
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import slow_links
from progress import each, say

RANKS = 4
MODEL = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 32,
    "ffn_hidden_size": 512,
    "vocab_size": 257,
    "max_seq_len": 128,
}
RUN = {
    "batch.seq_len": 128,
    "batch.micro_batch_size": 4,
    "batch.global_batch_size": 32,
    "train.save_every": 0,
    "train.device": "cpu",
}
ADAMW = {"optimizer.name": "adamw", "optimizer.lr": 2e-3}
LAMB = {"optimizer.name": "lamb", "optimizer.lr": 1e-2}
SGD = {"optimizer.name": "sgd", "optimizer.lr": 0.3, "optimizer.momentum": 0.9}
STRATEGIES: dict[str, dict[str, object]] = {
    "all_reduce adamw": ADAMW,
    "all_reduce lamb": LAMB,
    "all_reduce sgd": SGD,
    "onebit lamb": LAMB | {"sync.method": "onebit"},
    "onebit adamw": ADAMW | {"sync.method": "onebit"},
    "decentlam ring": SGD | {"sync.method": "decentlam"},
    "decentlam exponential": SGD
    | {"sync.method": "decentlam", "sync.topology": "one_peer_exponential"},
    "dmsgd ring": SGD | {"sync.method": "dmsgd"},
    "lsgd": SGD | {"sync.method": "lsgd"},
    "easgd": SGD | {"sync.method": "easgd"},
    "local 8": ADAMW | {"sync.method": "local", "sync.period": 8},
    "diloco 8": ADAMW | {"sync.method": "diloco", "sync.period": 8},
    "diloco 8, 4 bits": ADAMW | {"sync.method": "diloco", "sync.period": 8, "sync.quantise": 4},
    "sparseloco 8": ADAMW
    | {"sync.method": "diloco", "sync.period": 8, "sync.top_k": 0.02, "sync.quantise": 2},
}


def main() -> None:
    args = parse()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = root / "data"
        mtcli("preprocess", "stdlib", "--output", str(data), "--tokenizer", "bytes")
        names = args.only or list(STRATEGIES)
        for name in each(names):
            rows[name] = curve(name, data, root / f"curve {name}", args.steps)
            say(f"{name:<24}{told(rows[name])}")
        if lacks := slow_links.missing():
            say(f"seconds over links are left out: {lacks}")
        else:
            for name, gbits in each([(name, rate) for name in names for rate in args.gbits]):
                found = over_link(name, data, root / f"{gbits:g} {name}", (gbits, args.timed_steps))
                rows[name].setdefault("links", {})[f"{gbits:g}"] = found
                say(
                    f"{name:<24}{gbits:>5g} Gbit/s {found['seconds']:8.3f} s, "
                    f"planned {found['planned']:8.3f} s, {found['planned'] / found['seconds']:.2f}"
                )
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    if args.plot:
        plot(rows, args.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--timed-steps", type=int, default=16)
    parser.add_argument("--gbits", type=float, nargs="*", default=[0.1, 1.0, 10.0])
    parser.add_argument("--only", nargs="*", choices=STRATEGIES)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    return parser.parse_args()


def curve(name: str, data: Path, output: Path, steps: int) -> dict:
    """The run of a strategy, by shared memory: losses, and bytes that its ranks sent."""
    mtcli("train", "--nproc", str(RANKS), *flags(name, data, output, steps))
    steps_done = metrics(output)
    return {
        "losses": [step["loss"] for step in steps_done],
        "bytes": [step["sync_bytes"] for step in steps_done],
        "valid_loss": steps_done[-1]["valid_loss"],
        "replica_distance": steps_done[-1].get("replica_distance"),
    }


def over_link(name: str, data: Path, output: Path, about: tuple[float, int]) -> dict:
    """Mean seconds of a step over links of a rate, and the plan's."""
    gbits, steps = about
    arguments = flags(name, data, output, steps + 2)
    with slow_links.linked(RANKS, gbits) as prefixes:
        slow_links.train(prefixes, arguments, output.with_name(f"{output.name}.log"))
    seconds = mean(step["step_seconds"] for step in metrics(output)[2:])
    device = f"cpu,network=ethernet-{gbits:g}"
    answer = mtcli(
        "plan", str(output / "config.toml"), "--gpus", str(RANKS), "--device", device, "--json", "-"
    )
    return {"seconds": seconds, "planned": json.loads(answer)["step_seconds"]}


def flags(name: str, data: Path, output: Path, steps: int) -> list[str]:
    """The arguments of `mtcli train`: one config for all, and the strategy's own fields."""
    model = {f"model.{field}": value for field, value in MODEL.items()}
    run = {"train.steps": steps, "train.output": str(output), "train.eval_every": steps}
    run["optimizer.warmup_steps"] = min(10, steps)
    fields = model | RUN | run | {"data.train": f'["{data}"]'} | STRATEGIES[name]
    return [
        "tiny",
        *(word for field, value in fields.items() for word in ("--set", f"{field}={value}")),
    ]


def metrics(output: Path) -> list[dict]:
    """The records of a run's steps."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def mtcli(*words: str) -> str:
    """Runs a command; returns its stdout. Ends the benchmark where it fails."""
    done = subprocess.run([sys.executable, "-m", "mtcli", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: mtcli {' '.join(words)}\n{done.stderr[-2000:]}")
    return done.stdout


def told(row: dict) -> str:
    last = mean(row["losses"][-10:])
    sent = sum(row["bytes"]) / len(row["bytes"])
    return f"loss {last:.3f}, valid {row['valid_loss']:.3f}, {sent / 1e6:8.3f} MB a step"


def table(rows: dict[str, dict]) -> str:
    """The rows as Markdown: bytes also as a share of all_reduce's."""
    rates = sorted({rate for row in rows.values() for rate in row.get("links", {})}, key=float)
    head = ["strategy", "loss", "valid", "MB per step", "of all_reduce"]
    head += [f"s at {rate} Gbit/s (planned)" for rate in rates]
    lines = [head, ["---"] * len(head)]
    plain = next((sum(row["bytes"]) for name, row in rows.items() if "all_reduce" in name), None)
    for name, row in rows.items():
        sent = sum(row["bytes"])
        share = f"{sent / plain:.1%}" if plain else ""
        cells = [name, f"{mean(row['losses'][-10:]):.3f}", f"{row['valid_loss']:.3f}"]
        cells += [f"{sent / len(row['bytes']) / 1e6:.3f}", share]
        links = (row.get("links", {}).get(rate) for rate in rates)
        cells += [f"{x['seconds']:.3f} ({x['planned']:.3f})" if x else "" for x in links]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(rows: dict[str, dict], path: str) -> None:
    """Draws the loss against the bytes that were sent so far, and seconds by link."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {name: f"C{i % 10}" for i, name in enumerate(rows)}
    for i, (name, row) in enumerate(rows.items()):
        sent, total = [], 0
        for step in row["bytes"]:
            total += step
            sent.append(total / 1e6)
        losses = smoothed(row["losses"])
        left.plot(sent, losses, color=colours[name], ls="-" if i < 10 else "--", label=name)
    left.set(xscale="symlog", xlabel="MB sent for data parallelism so far", ylabel="training loss")
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    linked = {name: row["links"] for name, row in rows.items() if "links" in row}
    rates = sorted({rate for links in linked.values() for rate in links}, key=float)
    for i, rate in enumerate(rates):
        at = [y + 0.25 * i for y in range(len(linked))]
        right.barh(
            at,
            [links[rate]["seconds"] for links in linked.values()],
            0.22,
            color=f"C{i}",
            label=f"{rate} Gbit/s",
        )
        planned = [links[rate]["planned"] for links in linked.values()]
        right.plot(planned, at, "k|", ms=9, label="planned" if i == 0 else None)
    if linked:
        right.set_yticks([y + 0.25 for y in range(len(linked))], list(linked), fontsize=8)
        right.set(xscale="log", xlabel="seconds of a step")
        right.invert_yaxis()
        right.legend(fontsize=8)
        right.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=120)


def smoothed(losses: Sequence[float], window: int = 8) -> list[float]:
    """Means of the last few losses."""
    return [mean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


if __name__ == "__main__":
    main()
