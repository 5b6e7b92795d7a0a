"""Every kernel beside torch, torch.compile and Liger, and beside the floors of the same run.

    python benchmarks/gpu/bench_kernels.py                        # measure; writes a JSON file
    python benchmarks/gpu/bench_kernels.py --tune                 # first choose each kernel's best configuration
    python benchmarks/gpu/bench_kernels.py --device cpu --smoke   # each entry once, small, interpreted
    python benchmarks/gpu/bench_kernels.py --device cpu --tiny --tune --output FOLDER   # all of it, rehearsed

Outputs and gradients are compared before anything is timed. Each entry is written when it is done;
a run that was cut short, or an entry that failed, does not keep the next run from the others.
compile.py compiles them without a GPU.
"""  # noqa: E501

import argparse
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic

from record import ONLY_REHEARSED, RESULTS, open_record


def main() -> None:
    args = parse()
    if args.device == "cpu" and not (args.smoke or args.tiny):
        print(f"error: {ONLY_REHEARSED}", file=sys.stderr)
        sys.exit(2)
    os.environ["TRITON_INTERPRET"] = "1" if args.device == "cpu" else "0"

    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU here; try --device cpu --smoke", file=sys.stderr)
        sys.exit(2)
    wanted = [e for e in entries() if not args.only or e.name in args.only]
    if args.smoke:
        smoke(wanted, args.device)
    elif args.device == "cpu":
        from played import played_gpu

        with played_gpu():
            measure(wanted, args)
    else:
        measure(wanted, args)


def entries() -> list:
    """All of them; what costs a step most comes first."""
    import elementwise
    import mixture
    import scores
    import updates

    return [entry for group in (scores, mixture, updates, elementwise) for entry in group.ENTRIES]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="run each entry once, on small inputs")
    parser.add_argument("--tiny", action="store_true", help="small inputs, to try the script")
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

    from mtcli.kernels.triton_launch import interpreted

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


def measure(entries, args) -> None:
    """Times every entry and its rivals at each size; prints a table and writes the rows.

    What fails is written down and the rest goes on, in a new process where the CUDA context is of
    no more use.
    """
    import torch
    from choosing import chosen, keep
    from harness import floors

    deadline = monotonic() + args.budget
    # CUDA graphs are recorded on another stream than the default, and so are their inputs.
    torch.cuda.set_stream(torch.cuda.Stream())
    record = open_record(args.output, "kernels", torch.cuda.get_device_name(), args.afresh)
    # Once for a record: they take as long as a small entry.
    if "flop_per_s" not in record.facts:
        record.facts |= floors(args.repeats)
    copy, rate = record.facts["copy_bytes_per_s"], record.facts["flop_per_s"]
    print(
        f"{record.facts['device']}: copy {copy / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s"
    )
    keep(chosen(record.rows), args.device)  # by a run on another machine, perhaps
    for entry, dtype, size in ((e, *case) for e in entries for case in cases(e, args)):
        key = {"entry": entry.name, "size": list(size), "dtype": str(dtype)}
        if record.has(**key, whole=True) or record.has(**key, failed=True):
            continue
        if monotonic() > deadline:
            sys.exit(f"error: the time was up before {entry.name} {size}; the next run goes on")
        record.drop(lambda row, key=key: "ms" in row and key.items() <= row.items())
        attempt(entry, key, (dtype, size), record, args, deadline)
    print(f"wrote {record.path}")
    failed = {row["entry"]: None for row in record.rows if row.get("failed")}
    if failed:
        sys.exit(f"error: these entries failed: {', '.join(failed)}")


def cases(entry, args) -> list:
    """(dtype, size) of an entry; the interpreter multiplies in float32 alone."""
    import torch

    sizes = [entry.small] if args.tiny else entry.sizes
    dtypes = [torch.float32] if args.device == "cpu" else entry.dtypes
    return [(dtype, size) for dtype in dtypes for size in sizes]


def attempt(entry, key, case, record, args, deadline) -> None:
    """Chooses and times at one size, and adds the rows, or one that says why not."""
    import torch
    from choosing import chosen, tune

    try:
        if args.tune and not record.has(**key, tuned=True):
            known = chosen(record.rows)
            record.add(key | {"tuned": True, "chosen": tune(entry, args.device, *case, known)})
        for row in sized(entry, case, record.facts, args):
            record.add(key | row)
        record.add(key | {"whole": True})
        return
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        print(f"{entry.name} {case[1]}: {why}", flush=True)
        record.add(key | {"failed": True, "why": why[:600]})
    # Outside of `except`, which keeps the tensors of the failed call alive.
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        go_on(deadline)


def go_on(deadline) -> None:
    """Begins this script again in place of this process, with what is left of the time."""
    flags = [word for word in sys.argv if word != "--afresh"]
    sys.stdout.flush()
    budget = ["--budget", str(max(0.0, deadline - monotonic()))]
    os.execv(sys.executable, [sys.executable, *flags, *budget])


def sized(entry, case, limits, args):
    """A row per pass: milliseconds of each function, and parts of the floors."""
    import torch
    import torch._functorch.config
    from harness import agree, milliseconds, passes, tried

    (dtype, size), repeats = case, args.repeats
    arguments = entry.make(args.device, dtype, *size)
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
            who: tried(partial(make, entry, function, arguments), repeats)
            if who in entry.chosen
            else milliseconds(make(entry, function, arguments), repeats)
            for who, function in functions.items()
        }
        times = {who: ms for who, ms in times.items() if ms < float("inf")}
        row = {"pass": name, "ms": times}
        row["of_copy"] = moved / times["mtcli"] * 1e3 / limits["copy_bytes_per_s"]
        row["of_product"] = flops / times["mtcli"] * 1e3 / limits["flop_per_s"]
        cells = "  ".join(f"{who} {ms:.3f}" for who, ms in times.items())
        parts = f"copy {row['of_copy']:.2f}  product {row['of_product']:.2f}"
        print(f"{entry.name:24}{name:9}{str(size):24}{cells}  {parts}", flush=True)
        yield row


if __name__ == "__main__":
    main()
