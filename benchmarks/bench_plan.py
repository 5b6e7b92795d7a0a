"""C12: a step's seconds and bytes as `mtcli plan` predicts them for this CPU, and as they are.

Each layout is planned and then run, `mtcli plan --device cpu` and `mtcli profile` as a user would:
the median of the timed steps, and the bytes of the fullest rank: weights, gradients, optimizer,
and what a step keeps on top. The first plan of a kind of run measures the machine.

    python benchmarks/bench_plan.py [--steps 8] [--only wide,tp] [--json FILE]
"""

import json
import tempfile
from pathlib import Path

from arguments import Arguments, write_rows
from progress import each, say
from runs import mtcli, sets

from mtcli.core.plan.hardware import HERE

GOAL_TIME, GOAL_MEMORY = 0.15, 0.05
RESERVED = HERE.reserved_bytes  # of plan's `other`: what a process has besides tensors

SMALL = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 4096}
WIDE = {"num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 8192}
LLAMA = {"architecture": "llama", "ffn_hidden_size": 704, "num_kv_heads": 2}
MIXTRAL = {"architecture": "mixtral", "ffn_hidden_size": 512, "num_experts": 8, "top_k": 2}

# name: (ranks, model, seq_len, sequences of a micro-batch and of a step, further settings)
# fmt: off
CASES = {
    "one process":      (1, SMALL, 256, 4, 8, ()),
    "tp=2":             (2, SMALL, 256, 4, 8, ("parallel.tp=2",)),
    "pp=2, 8 micro":    (2, SMALL, 256, 1, 8, ("parallel.pp=2",)),
    "dp=2":             (2, SMALL, 256, 4, 8, ()),
    "cp=2":             (2, SMALL, 256, 4, 8, ("parallel.cp=2",)),
    "ep=2":             (2, SMALL | MIXTRAL, 256, 4, 8, ("parallel.ep=2",)),
    "full recompute":   (1, SMALL, 256, 4, 8, ("parallel.recompute=full",)),
    "llama":            (1, SMALL | LLAMA, 256, 4, 8, ()),
    "llama, tp=2":      (2, SMALL | LLAMA, 256, 4, 8, ("parallel.tp=2",)),
    "ep=2, bf16":       (2, SMALL | MIXTRAL, 256, 4, 8, ("parallel.ep=2", "train.precision=bf16")),
    "cp=2, recompute":  (2, SMALL, 256, 4, 8, ("parallel.cp=2", "parallel.recompute=full")),
    "4 on 2: tp, dp":   (4, SMALL, 256, 4, 8, ("parallel.tp=2",)),
    "4 on 2: tp, pp":   (4, SMALL, 256, 1, 4, ("parallel.tp=2", "parallel.pp=2")),
    "wide":             (1, WIDE, 512, 1, 4, ()),
    "wide, bf16":       (1, WIDE, 512, 1, 4, ("train.precision=bf16",)),
    "wide, tp=2":       (2, WIDE, 512, 1, 4, ("parallel.tp=2",)),
    "wide, pp=2":       (2, WIDE, 512, 1, 8, ("parallel.pp=2",)),
    "wide, dp=2":       (2, WIDE, 512, 1, 4, ()),
    "wide, cp=2":       (2, WIDE, 1024, 1, 2, ("parallel.cp=2",)),
}
# fmt: on


def main() -> None:
    parser = Arguments(__doc__, steps=1, only="one process")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="", help="cases that hold one of these words, by commas")
    args = parser.parse_args()
    chosen = [name for name in CASES if any(word in name for word in args.only.split(","))]
    if not chosen:
        parser.error(f"--only {args.only}: no case has such a word; {'; '.join(CASES)}")
    print(f"{'layout':16}{'predicted':>11}{'measured':>11}{'ratio':>7}  state  kept, MB   ratio")
    rows = {}
    for name in each(chosen):
        rows[name] = measure(name, args.steps)
        show(name, rows[name])
    off = sorted(abs(row["seconds_ratio"] - 1) for row in rows.values())
    exact = all(abs(row["state_ratio"] - 1) <= GOAL_MEMORY for row in rows.values())
    inside = sum(one <= GOAL_TIME for one in off)
    print(f"time   within {GOAL_TIME:.0%}: {inside} of {len(off)}, worst {off[-1]:.0%}")
    print(f"state  within {GOAL_MEMORY:.0%}: {'met' if exact else 'MISSED'}")
    write_rows(args.json, rows)


def show(name: str, row: dict[str, float]) -> None:
    say(
        f"{name:16}{1e3 * row['predicted_seconds']:8.1f} ms{1e3 * row['measured_seconds']:8.1f} ms"
        f"{row['seconds_ratio']:7.2f} {row['state_ratio']:6.2f} {row['measured_kept'] / 1e6:9.1f}"
        f"{row['kept_ratio']:8.2f}"
    )


def measure(name: str, steps: int) -> dict[str, float]:
    ranks, model, seq_len, micro_batch, batch, settings = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text(toml(model | {"max_seq_len": seq_len}, seq_len, micro_batch, batch))
        wanted = sets(settings)
        device = ["--gpus", str(ranks), "--device", "cpu"]
        saves = ["--set", "train.async_save=false"]  # profile makes none
        planned = told("plan", config, *device, *wanted, *saves)
        timed = ["--nproc", str(ranks), "--steps", str(steps), "--set", "train.device=cpu"]
        real = told("profile", config, *timed, *wanted)
    said, held = planned["memory_bytes"], real["memory_bytes"]
    state = ("weights", "gradients", "optimizer")
    seconds = real["step_seconds"]["median"]
    return {
        "predicted_seconds": planned["step_seconds"],
        "measured_seconds": seconds,
        "seconds_ratio": planned["step_seconds"] / seconds,
        "state_ratio": sum(said[kind] for kind in state) / sum(held[kind] for kind in state),
        "predicted_kept": said["activations"] + said["other"] - RESERVED,
        "measured_kept": held["activations"],
        "kept_ratio": (said["activations"] + said["other"] - RESERVED) / held["activations"],
    }


def toml(model: dict, seq_len: int, micro_batch: int, batch: int) -> str:
    lines = [f"{name} = {json.dumps(value)}" for name, value in model.items()]
    sizes = f"seq_len = {seq_len}\nmicro_batch_size = {micro_batch}\nglobal_batch_size = {batch}"
    return "[model]\n" + "\n".join(lines) + f"\n\n[batch]\n{sizes}\n"


def told(command: str, *arguments: object) -> dict:
    """What a command says as JSON."""
    return json.loads(mtcli(command, *arguments, "--json", "-"))


if __name__ == "__main__":
    main()
