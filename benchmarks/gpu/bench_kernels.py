"""Every kernel beside torch, torch.compile and Liger, and beside the floors of the same run.

    python benchmarks/gpu/bench_kernels.py                        # measure; writes a JSON file
    python benchmarks/gpu/bench_kernels.py --tune                 # first choose each kernel's best configuration
    python benchmarks/gpu/bench_kernels.py --device cpu --smoke   # each entry once, small, interpreted
    python benchmarks/gpu/bench_kernels.py --compile 90           # each kernel, for a GPU that is not there

Outputs and gradients are compared before anything is timed.
"""  # noqa: E501

import argparse
import json
import os
import sys
from contextlib import ExitStack
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


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
    groups = (elementwise, mixture, scores, updates)
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
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
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

    from mtcli.kernels.launch import compiled_for

    for entry in entries:
        for dtype in entry.dtypes if first else {*entry.dtypes, torch.float32}:
            arguments = entry.make("cpu", dtype, *(entry.compiled or entry.small))
            with compiled_for("cuda", arch, 32, first=first) as names:
                for make in passes(entry).values():
                    make(entry, entry.ours, arguments)()
            for name in dict.fromkeys(names):
                print(f"{entry.name} {str(dtype).removeprefix('torch.')}: {name}")


def measure(entries, args) -> None:
    """Times every entry and its rivals; prints a table and writes the rows."""
    import torch
    import triton
    from harness import floors
    from tune import tune

    if args.tune:
        print(f"wrote {tune(entries)}")
    limits = floors(args.repeats)
    copy, rate = limits["copy_bytes_per_s"], limits["flop_per_s"]
    device = torch.cuda.get_device_name()
    print(f"{device}: copy {copy / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s")
    rows = [row for entry in entries for row in rows_of(entry, limits, args.repeats)]
    facts = {
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": str(date.today()),
        **limits,
        "rows": rows,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    name = f"kernels-{device.replace(' ', '-')}-{facts['date']}.json"
    (args.output / name).write_text(json.dumps(facts, indent=1) + "\n")
    print(f"wrote {args.output / name}")


def rows_of(entry, limits, repeats):
    """A row per size, dtype and pass: milliseconds of each function, and parts of the floors."""
    for dtype in entry.dtypes:
        for size in entry.sizes:
            yield from sized(entry, size, dtype, limits, repeats)


def sized(entry, size, dtype, limits, repeats):
    import torch
    from harness import agree, milliseconds, passes

    arguments = entry.make("cuda", dtype, *size)
    first = next(iter(entry.rivals.values()))
    functions = {"mtcli": entry.ours, **entry.rivals}
    compiled = next(iter(entry.rivals)) if entry.torch_compiles is None else entry.torch_compiles
    if compiled:
        functions["compiled"] = torch.compile(entry.rivals[compiled])
    for name, make in passes(entry).items():
        moved = (entry.forward_bytes if name == "forward" else entry.backward_bytes)(
            dtype.itemsize, *size
        )
        flops = (entry.forward_flops if name == "forward" else entry.backward_flops)(*size)
        agree(entry, make(entry, entry.ours, arguments), make(entry, first, arguments), dtype)
        times = {
            who: milliseconds(make(entry, function, arguments), moved, repeats)
            for who, function in functions.items()
        }
        row = {"entry": entry.name, "pass": name, "size": size, "dtype": str(dtype), "ms": times}
        row["of_copy"] = moved / times["mtcli"] * 1e3 / limits["copy_bytes_per_s"]
        row["of_product"] = flops / times["mtcli"] * 1e3 / limits["flop_per_s"]
        cells = "  ".join(f"{who} {ms:.3f}" for who, ms in times.items())
        parts = f"copy {row['of_copy']:.2f}  product {row['of_product']:.2f}"
        print(f"{entry.name:24}{name:9}{str(size):24}{cells}  {parts}", flush=True)
        yield row


if __name__ == "__main__":
    main()
