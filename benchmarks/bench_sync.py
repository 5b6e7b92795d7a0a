"""Every strategy of data parallelism on the same small GPT, data and seeds, on 4 processes.

Loss, bytes on the wire, and seconds of a step over links of several speeds, beside what plan
predicts for each. Links are made with network namespaces and tc (slow_links.py), so those columns
need Linux, root and iproute2; without, they are left out and it says so.

A timed step has one sequence per rank, so that the link decides and not this machine's cores: what
replicas send does not depend on the batch. Steps of a run that send as much, after steps that sent
as much, are of one kind: what a socket has taken may arrive in the next step. The seconds of a kind
are those of its fastest step, since other programs keep ranks from a core; a run's are the mean
over all of its steps.

    python benchmarks/bench_sync.py --json FILE --plot docs/images/sync.png
    python benchmarks/bench_sync.py --read FILE --plot docs/images/sync.png
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import MappingProxyType

import slow_links
from arguments import Arguments, write_rows
from progress import each, say
from runs import metrics, mtcli, sets

RANKS = 4
MODEL = {
    "num_layers": 2,
    "hidden_size": 192,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 48,
    "ffn_hidden_size": 768,
    "vocab_size": 257,
    "max_seq_len": 64,
}
RUN = {
    "batch.seq_len": 64,
    "batch.micro_batch_size": 4,
    "batch.global_batch_size": 16,
    "train.save_every": 0,
    "train.device": "cpu",
    "parallel.tp": 1,  # every other field of a layout is 1 too: plan searches where none is set
}
TIMED = {"batch.micro_batch_size": 1, "batch.global_batch_size": RANKS}
FIRST = 2  # steps that are not timed: they allocate
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
    "dmsgd ring": SGD | {"sync.method": "dmsgd"},
    "dmsgd one peer": SGD | {"sync.method": "dmsgd", "sync.topology": "one_peer_exponential"},
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
    rows: dict[str, dict] = json.loads(Path(args.read).read_text()) if args.read else {}
    names = args.only or list(STRATEGIES)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if lacking := [name for name in names if "links" not in rows.get(name, {})]:
            measure(rows, lacking, root, args)
        for name, row in rows.items():
            for gbits, link in row.get("links", {}).items():
                link["planned"] = planned(name, gbits, args.timed_steps)
    print(table(rows))
    write_rows(args.json, rows)
    if args.plot:
        plot(rows, args.plot)


def measure(rows: dict[str, dict], names: list[str], root: Path, args: argparse.Namespace) -> None:
    """Trains with each strategy, alone unless it has a row, and over links; adds its row."""
    data = root / "data"
    mtcli("preprocess", "stdlib", "--output", str(data), "--tokenizer", "bytes")
    if lacks := args.gbits and slow_links.missing():
        say(f"seconds over links are left out: {lacks}")
    for name in each(names):
        row = rows.get(name) or curve(flags(name, args.steps) + files(data, root / f"curve {name}"))
        rates = [] if lacks else args.gbits
        row["links"] = {}
        for gbits in rates:
            output = root / f"{gbits:g} {name}"
            arguments = flags(name, args.timed_steps, TIMED) + files(data, output)
            row["links"][f"{gbits:g}"] = {"seconds": over_link(arguments, output, gbits)}
        rows[name] = row
        seconds = ", ".join(f"{x['seconds']:.3f} s at {at}" for at, x in row["links"].items())
        say(f"{name:<24}{told(row)}, {seconds}")
        write_rows(args.json, rows)


def parse() -> argparse.Namespace:
    parser = Arguments(__doc__, steps=2, timed_steps=4, gbits=[], only=["all_reduce adamw"])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--timed-steps", type=int, default=32)
    parser.add_argument("--gbits", type=float, nargs="*", default=[0.1, 1.0, 10.0])
    parser.add_argument("--only", nargs="*", choices=STRATEGIES)
    parser.add_argument("--read", help="rows that were measured; only what they lack is")
    parser.add_argument("--plot", help="draw them into this file")
    return parser.parse_args()


def curve(arguments: list[str]) -> dict:
    """The run of a strategy, by shared memory: losses, and bytes that its ranks sent."""
    mtcli("train", *arguments, "--nproc", str(RANKS))
    steps = metrics(Path(arguments[-1].partition("=")[2]))
    return {
        "losses": [round(step["loss"], 4) for step in steps],
        "bytes": [step["sync_bytes"] for step in steps],
        "valid_loss": steps[-1]["valid_loss"],
        "replica_distance": steps[-1].get("replica_distance"),
    }


def over_link(arguments: list[str], output: Path, gbits: float) -> float:
    """Mean seconds of a step over links of a rate; see the top."""
    with slow_links.linked(RANKS, gbits) as prefixes:
        slow_links.train(prefixes, arguments, output.with_name(f"{output.name}.log"))
    steps = metrics(output)
    sent = [step["sync_bytes"] for step in steps]
    kinds = list(zip(sent[:1] + sent, sent, strict=False))
    of_kind: dict[tuple[int, int], list[float]] = {}
    for kind, step in list(zip(kinds, steps, strict=True))[FIRST:]:
        of_kind.setdefault(kind, []).append(step["step_seconds"])
    fastest = {kind: min(seconds) for kind, seconds in of_kind.items()}
    return mean(fastest[kind] for kind in kinds if kind in fastest)


def planned(name: str, gbits: str, steps: int) -> float:
    """Seconds of a timed step that plan predicts for links of a rate."""
    device = f"cpu,network=ethernet-{gbits}"
    words = ("--gpus", str(RANKS), "--device", device, "--json", "-")
    return json.loads(mtcli("plan", *flags(name, steps, TIMED), *words))["step_seconds"]


def flags(name: str, steps: int, more: Mapping[str, object] = MappingProxyType({})) -> list[str]:
    """The arguments that name a run: one config for all, and the strategy's own fields."""
    model = {f"model.{field}": value for field, value in MODEL.items()}
    run = {"train.steps": steps, "train.eval_every": steps}
    run["optimizer.warmup_steps"] = min(10, steps)
    fields = model | RUN | run | STRATEGIES[name] | more
    return ["tiny", *settings(fields)]


def files(data: Path, output: Path) -> list[str]:
    """The arguments that name what a run reads and, last, where it writes."""
    return settings({"data.train": f'["{data}"]', "train.output": str(output)})


def settings(fields: Mapping[str, object]) -> list[str]:
    return sets(f"{field}={value}" for field, value in fields.items())


def told(row: dict) -> str:
    last = mean(row["losses"][-10:])
    sent = sum(row["bytes"]) / len(row["bytes"])
    return f"loss {last:.3f}, valid {row['valid_loss']:.3f}, {sent / 1e6:8.3f} MB a step"


def table(rows: dict[str, dict]) -> str:
    """The rows as Markdown: bytes also as a share of all_reduce's."""
    rates = sorted({rate for row in rows.values() for rate in row.get("links", {})}, key=float)
    head = ["strategy", "training loss", "validation loss", "MB per step", "of all_reduce"]
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

    figure = Figure(figsize=(13, 6), layout="constrained")
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
    figure.legend(loc="outside lower center", ncols=7, fontsize=8)
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
        right.set_xticks([0.03, 0.05, 0.1, 0.2, 0.5], ["0.03", "0.05", "0.1", "0.2", "0.5"])
        right.set_xticks([], minor=True)
        right.invert_yaxis()
        right.legend(fontsize=8)
        right.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=120)


def smoothed(losses: Sequence[float], window: int = 8) -> list[float]:
    """Means of the last few losses."""
    return [mean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


if __name__ == "__main__":
    main()
