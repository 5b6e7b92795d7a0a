"""G1 to G5, G8, G9: the training step on one GPU beside transformers, Liger and torchtitan.

    python benchmarks/gpu/bench_step.py --budget 540        # by importance, until the time is up
    python benchmarks/gpu/bench_step.py --budget 540        # again: goes on with what is left
    python benchmarks/gpu/bench_step.py --only llama-1b --contenders hf torchtitan
    python benchmarks/gpu/bench_step.py --variant deep train.compile=true parallel.recompute=full
    python benchmarks/gpu/bench_step.py --device cpu --tiny # every row, small: do the scripts run?

First what the device can do (G0). Then pairs: our step and another's, on the same weights, batches
and optimizer, each in a process of its own, in turns. First losses have to agree, token by token.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from cases import CASES, VARIANTS, contenders, pairs
from record import RESULTS, Record, open_record
from turns import Child

EXPECTED = 90.0  # seconds that a pair takes: less left than this, and it is not begun


def main() -> None:
    args = parse()
    if args.child:
        return child(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children are ended too
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU here; try --device cpu --tiny", file=sys.stderr)
        sys.exit(2)
    sys.exit(measure(args))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--contenders", nargs="*", choices=contenders(), default=contenders())
    parser.add_argument("--variant", nargs="+", action="append", default=[], metavar="WORD",
                        help="a name and settings of ours, to measure beside our step")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contender")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--afresh", action="store_true", help="keep no rows of an earlier run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> int:
    """Every pair that the time allows; returns the exit code."""
    from pair import Pair

    deadline = monotonic() + args.budget
    found = limits(args, deadline)
    if "failed" in found:
        print(f"error: {found['failed']}", file=sys.stderr)
        return 1
    record = open_record(args.output, "step", found.pop("device"), args.afresh)
    record.facts |= found
    shown = (f"{x:.3g}" if isinstance(x, float) else str(x) for x in found.values())
    print(", ".join(map(" ".join, zip(found, shown, strict=True))), flush=True)
    variants = VARIANTS | {name: tuple(words) for name, *words in args.variant}
    wanted = [*args.contenders, *(name for name, *_ in args.variant)]
    left, wrong = [], False
    with Pair(partial(spawn, args), args, record.facts) as pair:
        for case, name in pairs(args.only, wanted):
            if record.has(case=case, contender=name):
                continue
            if deadline - monotonic() < min(EXPECTED, args.budget / 4):
                left.append(f"{case} beside {name}")
                continue
            row = pair.measure(CASES[case], name, variants.get(name), deadline)
            wrong |= say(row, record)
    if left:
        print(f"left out, as the time was up: {', '.join(left)}")
    print(f"wrote {record.path}")
    return int(wrong)


def limits(args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """The ceilings of a GPU, by a process that then leaves it; the CPU's, here."""
    if args.device == "cpu":
        import torch
        from ceilings import ceilings

        return ceilings(torch.device("cpu"))
    child = spawn(args, "ceilings")
    try:
        return child.hear(deadline)
    finally:
        child.end()


def say(row: dict[str, Any], record: Record) -> bool:
    """Prints a row and keeps it; True where something went wrong that should not."""
    title = f"{row['case']} beside {row['contender']}"
    if why := row.get("skipped"):
        print(f"{title}: skipped: {why}", flush=True)
        record.add(row)
        return False
    if row.get("late"):  # not kept: there may be time for it in the next run
        print(f"{title}: not finished, as the time was up", flush=True)
        return False
    record.add(row)
    if why := row.get("failed"):
        print(f"{title}: {why}", flush=True)
        return not row.get("memory")
    ours, theirs = row["mtcli"], row["other"]
    print(
        f"{title}: {ours['tokens_per_s']:,.0f} and {theirs['tokens_per_s']:,.0f} tokens/s, "
        f"ratio {row['ratio']:.2f}, MFU {ours['mfu']:.1%}, "
        f"first losses {row['apart']:.1e} apart{'' if row['agrees'] else ': THEY DIFFER'}",
        flush=True,
    )
    return not row["agrees"]


def spawn(args: argparse.Namespace, *words: str) -> Child:
    """A process of this script that is one contender, or that measures the ceilings."""
    from mtcli.core.runtime.launch import ALLOCATOR

    flags = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    return Child([__file__, *flags, "--child", *words], ALLOCATOR)


def child(args: argparse.Namespace) -> None:
    """What a process of `spawn` does: `ceilings`, or a case, a contender and settings of ours."""
    import torch
    from turns import answers, serve

    if args.tiny and args.device == "cpu":
        torch.set_num_threads(1)
    device = torch.device(args.device, *([0] if args.device == "cuda" else []))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.child == ["ceilings"]:
        from ceilings import ceilings

        return answers()(ceilings(device))
    case, name, *settings = args.child
    config = CASES[case].config(settings, args.tiny)
    serve(partial(builder(name), config), config, device)


def builder(name: str) -> Callable[..., Any]:
    """The function that makes a contender; any that is no rival is our step."""
    import contenders as known

    if name == "torchtitan":
        import torchtitan_llama

        return torchtitan_llama.torchtitan
    rivals = {
        "hf": known.hugging_face,
        "hf-bf16": known.hugging_face_bf16,
        "hf-liger": known.hugging_face_liger,
        "plain": known.plain,
    }
    return rivals.get(name, known.ours)


if __name__ == "__main__":
    main()
