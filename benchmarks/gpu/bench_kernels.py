"""Every kernel beside torch, torch.compile and Liger, and beside the floors of the same run.

    python benchmarks/gpu/bench_kernels.py                        # measure; writes a JSON file
    python benchmarks/gpu/bench_kernels.py --tune                 # first choose each kernel's best configuration
    python benchmarks/gpu/bench_kernels.py --device cpu --smoke   # each entry once, small, interpreted
    python benchmarks/gpu/bench_kernels.py --compile 90           # each kernel, for a GPU that is not there

Outputs and gradients are compared before anything is timed. Each entry is written when it is done;
a run that was cut short, or an entry that failed, does not keep the next run from the others.
"""  # noqa: E501

import argparse
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic

from record import RESULTS, open_record


def main() -> None:
    args = parse()
    os.environ["TRITON_INTERPRET"] = "1" if args.smoke and args.device == "cpu" else "0"

    import elementwise
    import mixture
    import scores
    import torch
    import updates

    if args.device == "cuda" and not args.compile and not torch.cuda.is_available():
        print("error: torch sees no GPU here; try --device cpu --smoke", file=sys.stderr)
        sys.exit(2)
    groups = (scores, mixture, updates, elementwise)  # what costs a step most comes first
    entries = [entry for group in groups for entry in group.ENTRIES]
    chosen = [e for e in entries if not args.only or e.name in args.only]
    if args.compile:
        compile_all(chosen, args.compile, args.first)
    elif args.smoke:
        smoke(chosen, args.device)
    else:
        measure(chosen, args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="run each entry once, on small inputs")
    parser.add_argument("--compile", type=int, metavar="SM", help="compile for a GPU, such as 90")
    parser.add_argument("--first", action="store_true", help="compile the default choices alone")
    parser.add_argument("--tune", action="store_true", help="choose configurations, and keep them")
    parser.add_argument("--only", nargs="*", default=[], help="names of entries")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no entry begins later")
    parser.add_argument("--afresh", action="store_true", help="keep no rows of an earlier run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def smoke(entries, device) -> None:
    """Runs every pass of every entry and compares ours with the first rival's."""
    import torch
    from harness import agree, passes

    from mtcli.kernels.launch import interpreted

    for entry in entries:
        arguments = entry.make(device, torch.float32, *entry.small)
        expected = next(iter(entry.rivals.values()))
        for name, make in passes(entry).items():
            theirs = make(entry, expected, arguments)
            with ExitStack() as stack:
                if device == "cpu":
                    stack.enter_context(interpreted())
                ours = make(entry, entry.ours, arguments)
                agree(entry, ours, theirs, torch.float32)
            print(f"{entry.name} {name}: as {next(iter(entry.rivals))}")


def compile_all(entries, arch, first) -> None:
    """Compiles what every entry launches, in each of its dtypes and in float32."""
    import torch
    from harness import passes

    from mtcli.kernels.ahead_of_time import compiled_for

    for entry in entries:
        for dtype in entry.dtypes if first else {*entry.dtypes, torch.float32}:
            arguments = entry.make("cpu", dtype, *(entry.compiled or entry.small))
            with compiled_for("cuda", arch, 32, default_only=first) as names:
                for make in passes(entry).values():
                    make(entry, entry.ours, arguments)()
            for name in dict.fromkeys(names):
                print(f"{entry.name} {str(dtype).removeprefix('torch.')}: {name}")


def measure(entries, args) -> None:
    """Times every entry and its rivals; prints a table and writes the rows.

    Where an entry fails the rest goes on in a new process, as its CUDA context may be of no use.
    """
    import torch
    from choosing import keep, tune
    from harness import floors

    deadline = monotonic() + args.budget
    record = open_record(args.output, "kernels", torch.cuda.get_device_name(), args.afresh)
    record.facts |= (limits := floors(args.repeats))
    copy, rate = limits["copy_bytes_per_s"], limits["flop_per_s"]
    print(
        f"{record.facts['device']}: copy {copy / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s"
    )
    for row in record.rows:
        keep(row.get("chosen", {}))  # by a run on another machine, perhaps
    for entry in entries:
        if record.has(entry=entry.name, whole=True) or record.has(entry=entry.name, failed=True):
            continue
        if monotonic() > deadline:
            sys.exit(f"error: the time was up before {entry.name}; the next run goes on with it")
        try:
            if args.tune and not record.has(entry=entry.name, tuned=True):
                record.add({"entry": entry.name, "tuned": True, "chosen": tune(entry)})
            rows = list(rows_of(entry, limits, args.repeats))
        except Exception as error:
            print(f"{entry.name}: {type(error).__name__}: {error}", flush=True)
            why = f"{type(error).__name__}: {error}"[:600]
            record.add({"entry": entry.name, "failed": True, "why": why})
            go_on(deadline)
        for row in rows:
            record.add(row)
        record.add({"entry": entry.name, "whole": True})
    print(f"wrote {record.path}")
    failed = [row["entry"] for row in record.rows if row.get("failed")]
    if failed:
        sys.exit(f"error: these entries failed: {', '.join(failed)}")


def go_on(deadline) -> None:
    """Begins this script again in place of this process, with what is left of the time."""
    flags = [word for word in sys.argv if word != "--afresh"]
    sys.stdout.flush()
    budget = ["--budget", str(max(0.0, deadline - monotonic()))]
    os.execv(sys.executable, [sys.executable, *flags, *budget])


def rows_of(entry, limits, repeats):
    """A row per size, dtype and pass: milliseconds of each function, and parts of the floors."""
    for dtype in entry.dtypes:
        for size in entry.sizes:
            yield from sized(entry, size, dtype, limits, repeats)


def sized(entry, size, dtype, limits, repeats):
    import torch
    import torch._functorch.config
    from harness import agree, milliseconds, passes, tried

    arguments = entry.make("cuda", dtype, *size)
    first = next(iter(entry.rivals.values()))
    functions = {"mtcli": entry.ours, **entry.rivals}
    compiled = next(iter(entry.rivals)) if entry.torch_compiles is None else entry.torch_compiles
    if compiled:
        # A backward is timed many times over one forward.
        torch._functorch.config.donated_buffer = False
        functions["compiled"] = torch.compile(entry.rivals[compiled])
    for name, make in passes(entry).items():
        moved = (entry.forward_bytes if name == "forward" else entry.backward_bytes)(
            dtype.itemsize, *size
        )
        flops = (entry.forward_flops if name == "forward" else entry.backward_flops)(*size)
        agree(entry, make(entry, entry.ours, arguments), make(entry, first, arguments), dtype)
        times = {
            who: (tried if who in entry.chosen else milliseconds)(
                partial(make, entry, function, arguments), moved, repeats
            )
            for who, function in functions.items()
        }
        times = {who: ms for who, ms in times.items() if ms < float("inf")}
        row = {"entry": entry.name, "pass": name, "size": size, "dtype": str(dtype), "ms": times}
        row["of_copy"] = moved / times["mtcli"] * 1e3 / limits["copy_bytes_per_s"]
        row["of_product"] = flops / times["mtcli"] * 1e3 / limits["flop_per_s"]
        cells = "  ".join(f"{who} {ms:.3f}" for who, ms in times.items())
        parts = f"copy {row['of_copy']:.2f}  product {row['of_product']:.2f}"
        print(f"{entry.name:24}{name:9}{str(size):24}{cells}  {parts}", flush=True)
        yield row


if __name__ == "__main__":
    main()
