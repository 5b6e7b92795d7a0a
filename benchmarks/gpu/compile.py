"""Compiles what launches of the kernels would, for GPUs that are not there, and says what it costs.

    python benchmarks/gpu/compile.py                                  # sm_90, bf16, default configs
    python benchmarks/gpu/compile.py --arch 80 90 --dtype bf16 fp32
    python benchmarks/gpu/compile.py --only 'flash *' --all-configs   # what tuning may choose, too
    python benchmarks/gpu/compile.py --arch 90 80 --roofline \\
        --markdown docs/reference/kernels-compiled.md

No GPU, driver or CUDA toolkit is needed. A case is an entry of the benchmark at one size
(recipes.py). What Triton has compiled before comes from its cache. Each kernel has a verdict:

    ok          nothing to object to
    error       Triton or ptxas refused it
    smem        more shared memory than a program may have: a launch raises OutOfResources
    registers   an SM has too few for one program: a launch fails
    spill       more than 32 bytes per thread go to local memory
    no-wgmma    (sm_90) a 16-bit GEMM of at least 64 rows by mma.sync, which has 60 % of the rate
    serialized  (sm_90) each wgmma waits for the one before it: registers do not suffice
    narrow      the average byte comes by loads below 64 bits per thread: a mask or an address
                that the compiler cannot see through

The exit status is 1 where a default config has an error, or would fail at its launch.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SPILL_BYTES, ROWS_OF_WGMMA, NARROW_BITS = 32, 64, 64
GROUP = 8  # cases of a task, whose kernels one call of nvdisasm disassembles
FAILING = {"error", "smem", "registers"}
HEAD = ["case", "kernel", "config", "registers", "spills st/ld, B", "shared, KiB", "programs/SM"]
HEAD += ["ld/st, bits", "in flight, KiB", "units", "verdict"]


@dataclass
class Kernel:
    """A kernel as a case launches it in a pass; `code` is None beside an error."""

    arch: int
    case: str
    dtype: str
    phase: str
    name: str
    config: dict[str, Any]
    is_default: bool
    constants: dict[str, Any] = field(default_factory=dict)
    code: Any = None
    error: str = ""

    @property
    def verdict(self) -> list[str]:
        """The words of the table above."""
        from machine_code import DEVICES, KIB

        if self.code is None:
            return ["error"]
        code, itemsize = self.code, 4 if self.dtype == "fp32" else 2
        enough_rows = self.config.get("ROWS", 0) >= ROWS_OF_WGMMA
        is_gemm = code.multiplies and itemsize == 2 and enough_rows and self.arch // 10 == 9
        smem = code.shared_bytes > DEVICES[self.arch].program_kib * KIB
        found = {
            "smem": smem,
            "registers": not smem and not code.programs,
            "spill": max(code.spill_stores, code.spill_loads) > SPILL_BYTES,
            "no-wgmma": is_gemm and "wgmma" not in code.units,
            "serialized": code.serialized,
            "narrow": 0 < code.load_bits < NARROW_BITS,
        }
        return [word for word, holds in found.items() if holds] or ["ok"]

    def cells(self) -> list[str]:
        """The cells of a table's row: those of HEAD."""
        config = " ".join(f"{name}={value}" for name, value in self.config.items())
        start = [f"{self.case} {self.dtype} {self.phase}", self.name, config]
        if self.code is None:
            return [*start, *[""] * 7, f"error: {self.error[:160]}"]
        code = self.code
        return [
            *start,
            str(code.registers),
            f"{code.spill_stores}/{code.spill_loads}",
            f"{code.shared_bytes / 1024:.1f}",
            f"{code.programs} ({code.limited_by})",
            f"{code.load_bits:.0f}/{code.store_bits:.0f}",
            f"{code.in_flight_kib:.0f}",
            " ".join(f"{unit}:{count}" for unit, count in code.units.items()),
            " ".join(self.verdict),
        ]

    def line(self) -> str:
        """One line of text."""
        *numbers, verdict = self.cells()
        named = [f"{head} {cell}" for head, cell in zip(HEAD[3:], numbers[3:], strict=False)]
        return f"sm_{self.arch} {' '.join(numbers[:3])}: {verdict}; {'; '.join(named)}"


def main() -> None:
    args = parse()
    os.environ["TRITON_INTERPRET"] = "0"
    from recipes import CASES

    names = [name for name in CASES if any(fnmatch(name, p) for p in args.only or ["*"])]
    if args.roofline:
        names = [name for name in names if CASES[name].sizes]
    if not names:
        sys.exit(f"error: no case is named {' '.join(args.only)}\n\nhint: {', '.join(CASES)}")
    print(f"compiling {len(names)} cases in {args.jobs} processes", file=sys.stderr)
    kernels = []
    for kernel in compile_cases(names, args):
        print(kernel.line(), flush=True)
        kernels.append(kernel)
    verdicts = Counter(word for kernel in kernels for word in kernel.verdict)
    print(f"{len(kernels)} kernels: " + ", ".join(f"{n} {word}" for word, n in verdicts.items()))
    write(kernels, args)
    if any(kernel.is_default and FAILING & set(kernel.verdict) for kernel in kernels):
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="such as 80 90")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["bf16"])
    parser.add_argument("--only", nargs="*", default=[], help="names of cases, with * and ?")
    parser.add_argument("--all-configs", action="store_true", help="not the default ones alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--roofline", action="store_true", help="add what an H200 is to reach")
    parser.add_argument("--markdown", type=Path, help="a file for the tables")
    parser.add_argument("--json", type=Path, help="a file for all that was found")
    return parser.parse_args()


def compile_cases(names: list[str], args: argparse.Namespace) -> Iterator[Kernel]:
    """What the cases launch, compiled in parallel, in order."""
    import torch
    from recipes import CASES

    asked = [getattr(torch, DTYPES[name]) for name in args.dtype]
    groups = []
    for arch in args.arch:
        cases = [
            (name, dtype)
            for name in names
            if CASES[name].runs_on(arch)
            for dtype in CASES[name].dtypes(asked)
        ]
        groups += [(arch, cases[i : i + GROUP]) for i in range(0, len(cases), GROUP)]
    # Forked, so that torch is imported once.
    with ProcessPoolExecutor(args.jobs, get_context("fork")) as pool:
        for kernels in pool.map(partial(compile_group, not args.all_configs), groups):
            yield from kernels


def compile_group(default_only: bool, group: tuple[int, list[tuple[str, Any]]]) -> list[Kernel]:
    """The kernels of some cases, with what they cost on the group's architecture."""
    from machine_code import machine_codes

    arch, cases = group
    found = [each for case in cases for each in compile_case(arch, *case, default_only)]
    unique = {compiled.hash: compiled for _, compiled in found if compiled}
    codes = dict(zip(unique, machine_codes([*unique.values()], arch), strict=True))
    for kernel, compiled in found:
        if compiled:
            kernel.code = codes[compiled.hash]
    return [kernel for kernel, _ in found]


def compile_case(arch: int, name: str, dtype: Any, default_only: bool) -> list[tuple[Kernel, Any]]:
    """The kernels of one case, each once in a pass, and what Triton made of them, or None."""
    import torch
    from harness import passes
    from recipes import CASES

    from mtcli.kernels.ahead_of_time import compiled_for

    torch.set_num_threads(1)
    entry, size, _ = CASES[name]
    spelling = {getattr(torch, long): short for short, long in DTYPES.items()}[dtype]
    found: dict[Any, tuple[Kernel, Any]] = {}
    with compiled_for("cuda", arch, 32, default_only=default_only) as compilations:
        arguments = entry.make("cpu", dtype, *size)
        for phase, make in passes(entry).items():
            step = make(entry, entry.ours, arguments)
            compilations.clear()
            step()
            for each in compilations:
                config = dict(each.config)
                kernel = Kernel(arch, name, spelling, phase, each.name, config, each.is_default)
                if each.compiled is None:
                    kernel.error = " ".join(each.error.split())
                    found.setdefault((phase, each.name, str(config)), (kernel, None))
                else:
                    kernel.constants = constants(each.compiled)
                    found.setdefault((phase, each.compiled.hash), (kernel, each.compiled))
    return list(found.values())


def constants(compiled: Any) -> dict[str, Any]:
    """The constants that a launch gave, by name."""
    names = compiled.src.fn.arg_names
    return {names[at[0]]: value for at, value in compiled.src.constants.items()}


def write(kernels: list[Kernel], args: argparse.Namespace) -> None:
    """Writes the files that were asked for, and names them."""
    from record import versions
    from roofline import estimates
    from table import table

    if args.json:
        rows = [asdict(kernel) | {"verdict": kernel.verdict} for kernel in kernels]
        args.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
        print(f"wrote {args.json}")
    lines = []
    for arch in args.arch:
        cells = [kernel.cells() for kernel in kernels if kernel.arch == arch]
        lines += [f"## sm_{arch}", "", *table(HEAD, cells), ""]
    if args.roofline:
        lines += estimates([kernel for kernel in kernels if kernel.arch == 90])
        print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join([*title(), *lines]) + "\n")
        print(f"wrote {args.markdown}")


def title() -> list[str]:
    """The head of a page: the command that writes it, and versions."""
    import torch
    import triton

    command = " ".join(["python", "benchmarks/gpu/compile.py", *sys.argv[1:]])
    return [
        "# Kernels as compiled",
        "",
        f"Written by `{command}`: triton {triton.__version__}, torch {torch.__version__}.",
        "",
    ]


if __name__ == "__main__":
    main()
