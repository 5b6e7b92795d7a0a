"""The commands of this checkout beside those of another, such as the commit before a change.

Each row is a command that both run, in turn, in folders of their own, on the same words. Of a
training run its median step is compared, without the first two; of any other command the wall
clock, start-up included. The ratio is the other's median over this one's: above 1, this checkout is
the quicker one.

    git worktree add ../before COMMIT
    python benchmarks/compare_checkouts.py ../before [--only NAME...] [--repeats 5] [--json FILE]
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from arguments import Arguments, write_rows
from machine import commit
from progress import in_turn, say
from runs import SMALL, metrics, mtcli, sets

HERE = Path(__file__).resolve().parent.parent
WORDS = 20_000  # of the vocabulary that texts are drawn from
WARM_UPS = 2  # steps
TINY_ROWS = ["train tiny"]
LLAMA = ["model.architecture=llama", "model.num_kv_heads=2"]
EXPERTS = ["model.architecture=mixtral", "model.num_kv_heads=2", "model.num_experts=8"]
GPT_124M = ["model.hidden_size=768", "model.num_heads=12", "model.num_layers=12"]
GPT_124M += ["model.vocab_size=50304", "batch.seq_len=256", "batch.global_batch_size=4"]
FLAT = ["optimizer.schedule=constant", "train.save_every=1000000", 'data.train=["data"]']
STEPS = {  # row: (steps, processes, settings) of a training run
    "train tiny": (15, 1, []),
    "train tiny, llama": (15, 1, LLAMA),
    "train tiny, 8 experts": (15, 1, [*EXPERTS, "model.top_k=2"]),
    "train tiny, tp=2": (15, 2, ["parallel.tp=2"]),
    "train tiny, pp=2": (15, 2, ["parallel.pp=2"]),
    "train tiny, dp=2, zero=1": (15, 2, ["parallel.zero=1"]),
    "train 124M": (6, 1, [*GPT_124M, "batch.micro_batch_size=2"]),
}
COMMANDS = {  # row: its words; OUT is a folder that is not there yet
    "preprocess": "preprocess texts.jsonl --output OUT/data --tokenizer bytes",
    "curate": "curate texts.jsonl --output OUT",
    "eval": "eval run --task lambada=items.jsonl --json OUT.json",
    "generate": "generate run --prompt w1 --max-tokens 64 --temperature 0",
    "shard": "shard run OUT --layout tp=2",
    "sweep": "sweep tiny --vary optimizer.lr=1e-4,2e-4,5e-4,1e-3 --output OUT",
    "plan 8B": "plan llama-3.1-8b --gpus 16 --device h100",
}
SETTINGS = {
    "sweep": ["train.steps=50", *SMALL, *FLAT],
    "curate": ["stages=['normalise', 'exact', 'fuzzy']"],  # words of no language
}


def main() -> None:
    parser = Arguments(__doc__, repeats=1, only=TINY_ROWS)
    parser.add_argument("other", type=Path, nargs="?", default=HERE, help="its folder [this one]")
    parser.add_argument("--only", nargs="+", choices=[*STEPS, *COMMANDS], help="some rows [all]")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    small = SMALL if args.tiny else ()
    checkouts = {"this": HERE, "other": args.other.resolve()}
    with TemporaryDirectory() as folder:
        places = {name: Path(folder) / name for name in checkouts}
        for name, place in places.items():
            prepare(place, environment(checkouts[name], place), small)
        rows = []
        for row in args.only or [*STEPS, *COMMANDS]:
            seconds: dict[str, list[float]] = {name: [] for name in checkouts}
            for turn, name in enumerate(in_turn(seconds, args.repeats)):
                env = environment(checkouts[name], places[name])
                seconds[name].append(timed(row, places[name], env, small, turn))
            this, other = median(seconds["this"]), median(seconds["other"])
            rows.append({"row": row, **seconds, "ratio": other / this})
            say(f"{row:26} this {this:8.3f} s  other {other:8.3f} s  ratio {other / this:.2f}")
    write_rows(args.json, {"commit": commit(), "other": commit(args.other), "rows": rows})


def environment(checkout: Path, place: Path) -> dict[str, str]:
    """The environment in which Python finds a checkout's package, with a cache of its own."""
    return os.environ | {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(place / "cache")}


def prepare(place: Path, env: dict[str, str], small: tuple[str, ...]) -> None:
    """Writes the texts, and with the checkout itself tokens of them and a small run."""
    place.mkdir()
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(80)) for _ in range(4_000)]
    items = [" ".join(text.split()[:12]) for text in texts[:200]]
    for name, lines in {"texts": texts, "items": items}.items():
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (place / f"{name}.jsonl").write_text(rows)
    words = ["preprocess", "texts.jsonl", "--output", "data", "--tokenizer", "bytes"]
    mtcli(*words, folder=place, env=env)
    settings = [*small, *FLAT, "train.steps=3", "train.output=run"]
    mtcli("train", "tiny", *sets(settings), folder=place, env=env)


def timed(row: str, place: Path, env: dict[str, str], small: tuple[str, ...], turn: int) -> float:
    """Runs a row's command in a checkout's folder; returns the seconds of the row."""
    out = f"out-{row.replace(' ', '-').replace(',', '')}-{turn}"
    if row in STEPS:
        steps, ranks, more = STEPS[row]
        settings = [*small, *FLAT, *more, f"train.steps={steps}", f"train.output={out}"]
        mtcli("train", "tiny", *sets(settings), "--nproc", ranks, folder=place, env=env)
        return median(record["step_seconds"] for record in metrics(place / out)[WARM_UPS:])
    words = list(command(row, out))
    began = perf_counter()
    mtcli(*words, folder=place, env=env)
    return perf_counter() - began


def command(row: str, out: str) -> Iterator[str]:
    """The words of a row's command, which writes to `out`."""
    yield from (word.replace("OUT", out) for word in COMMANDS[row].split())
    yield from sets(SETTINGS.get(row, ()))


if __name__ == "__main__":
    main()
