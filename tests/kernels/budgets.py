"""What kernels may cost: limits by kernel and shape, held by compiling for GPUs that are not there.

A row of the table is a case of benchmarks/gpu/recipes.py and a kernel that it launches. All rows
keep LIMITS, but for those with limits of their OWN, which say why.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "compile.py"

HEADS = (16, 32, 64, 72, 80, 96, 112, 128, 160, 192, 256)
VOCABULARIES = (50257, 128256)
WIDTHS, LONG = (768, 1024, 1600, 2048, 4096, 5120, 8192), (12288, 16384)
EXPERTS = ("8x2", "16x4", "60x4", "64x6", "128x8", "256x8")
NORM, LONG_NORM = (("norm._forward", f"norm._backward{way}") for way in ("", "_in_chunks"))
NORMS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
GELU, SWIGLU = ("gelu._forward", "gelu._backward"), ("swiglu._forward", "swiglu._backward")
RELU2 = ("relu2._forward", "relu2._backward")
FLASH = ("flash_forward._forward", "flash_backward._dq", "flash_backward._dkv")
LOSS = ("cross_entropy._row_parts", "cross_entropy._logits_gradient")
ONE_LOSS = ("cross_entropy._losses_and_gradient",)
LAMB = ("lamb._moments", "lamb._totals", "lamb._step")
SORT = ("permute._count", "permute._place")
GROUPED = ("grouped_gemm._gemm", "grouped_gemm._wgrad")
SOFTMAX = ("softmax._forward", "softmax._backward")
ROUTE = ("top_k._route", "top_k._route_backward")

# entry, the labels of its cases, the kernels of each
BF16 = [
    ("flash", HEADS, FLASH),
    ("flash_documents", (64, 128), FLASH),
    ("flash_capped", HEADS, FLASH),
    ("attention", ("128x1", "128x2", "64x1"), FLASH[:1]),
    ("attention_backward", ("128x1", "128x2", "64x1"), FLASH[1:]),
    ("merge", (128,), ("merge._merge",)),
    *((name, WIDTHS, NORM) for name in NORMS),
    *((name, LONG, LONG_NORM) for name in NORMS),
    ("gelu", (768, 3072, 4096, 6400, 16384), GELU),
    ("gelu_tanh", (768, 3072, 4096, 16384), GELU),
    ("gelu_again", (3072, 4096, 16384), GELU[1:]),
    ("swiglu", (768, 5632, 14336, 28672), SWIGLU),
    ("swiglu_again", (768, 5632, 14336, 28672), SWIGLU[1:]),
    *((name, (768, 9216, 14336), SWIGLU) for name in ("geglu", "geglu_tanh")),
    ("geglu_again", (768, 9216, 14336), SWIGLU[1:]),
    ("relu2", (9216, 24576), RELU2),
    ("relu2_again", (9216, 24576), RELU2[1:]),
    ("dropout_add", (768, 1600, 4096), ("dropout._dropout",)),
    ("rotate", ("32x8x128", "12x12x64", "16x16x72"), ("rope._rotate",)),
    ("rotate_packed", ("32x8x128", "16x16x72"), ("rope._rotate",)),
    ("masked_softmax", (1024, 4096), SOFTMAX),
    ("softmax_of_all", (1024,), SOFTMAX),
    ("join_heads", ("12x12x64", "16x16x128", "8x2x72"), ("split_heads._join",)),
    ("cross_entropy", (50304, 128256), ONE_LOSS),
    ("cross_entropy_padded", VOCABULARIES, (*LOSS, *ONE_LOSS)),
    ("cross_entropy_capped", (256000,), (*LOSS, *ONE_LOSS)),
    ("sort_copies", EXPERTS, SORT),
    ("sort_with_capacity", ("8x2",), SORT),
    ("permute", ("2048x128x8", "4096x8x2", "768x60x4"), ("permute._scatter", "permute._gather")),
    (
        "unpermute",
        ("2048x128x8", "4096x8x2", "768x60x4"),
        ("permute._gather", "permute._gather_backward"),
    ),
    (
        "grouped_linear",
        (
            "8x8192x4096x28672",
            "8x8192x14336x4096",
            "128x2048x2048x1536",
            "128x256x2048x1536",
            "6x1024x2056x1400",
            "6x1024x2052x1402",
            "6x1024x2057x1401",
        ),
        GROUPED,
    ),
    (
        "grouped_outer",
        ("8x8192x4096x28672", "128x2048x2048x1536", "6x1024x2056x1400"),
        GROUPED[1:],
    ),
    (
        "syrk",
        ("1024x4096", "4096x4096", "4096x14336", "770x65"),
        ("syrk._syrk",),
    ),
    ("syrk_tall", ("14336x4096",), ("syrk._syrk",)),
    ("adamw", (), ("adamw._adamw",)),
    ("lamb", (), LAMB),
    ("compress", (), ("onebit._add", "onebit._pack")),
    ("decompress", (), ("onebit._unpack",)),
    ("normal", (), ("random._normal",)),
]
FP32 = [
    ("flash", HEADS, FLASH),
    ("flash_documents", (64, 128), FLASH),
    ("flash_capped", HEADS, FLASH),
    ("rms_norm", (4096,), NORM),
    ("layer_norm", (4096,), NORM),
    ("gelu", (4096,), GELU),
    ("swiglu", (5632,), SWIGLU),
    ("geglu", (9216,), SWIGLU),
    ("relu2", (9216,), RELU2),
    ("rotate", ("32x8x128",), ("rope._rotate",)),
    ("cross_entropy_padded", VOCABULARIES, (*LOSS, *ONE_LOSS)),
    ("cross_entropy_capped", (256000,), (*LOSS, *ONE_LOSS)),
    ("route", EXPERTS, ROUTE),
    ("route_groups", ("64x6", "256x8"), ROUTE),
    ("unpermute", ("2048x128x8",), ("permute._gather", "permute._gather_backward")),
    ("grouped_linear", ("8x8192x4096x28672", "6x1024x2056x1400"), GROUPED),
    ("grouped_outer", ("8x8192x4096x28672", "6x1024x2056x1400"), GROUPED[1:]),
    ("adamw", (), ("adamw._adamw",)),
]
# Compute capability 8.0 has no float8.
SM90 = [
    ("fp8_quantize", ("0x0", "0x1", "1x0", "1x1"), ("fp8._largest", "fp8._scale")),
    ("fp8_quantize", ("2x0", "2x1", "3x0", "3x1"), ("fp8._scale",)),
]  # fmt: skip


class Limits(NamedTuple):
    """Of a thread: bytes spilled, and the width in bits of the access by which a byte comes and
    goes, on average. Of a program: the device's shared memory and registers. Of a 16-bit GEMM of
    64 rows or more on sm_90: wgmma, not serialized.
    """

    spills: int = 32
    load_bits: int = 96
    store_bits: int = 96


# What rows have instead, and why.
OWN = {
    "*flash_backward._dkv": (Limits(load_bits=64), "a query has two numbers of 4 bytes"),
    "* rotate* 16x16x72 *": (Limits(load_bits=64, store_bits=64), "halves of 36 elements"),
    "*cross_entropy._row_parts": (Limits(store_bits=0), "three numbers of a row"),
    "* lamb._totals": (Limits(load_bits=32, store_bits=0), "two numbers of a chunk"),
    "* lamb *": (Limits(load_bits=64, store_bits=64), "half of it is for the last chunk, masked"),
    "* adamw *": (Limits(load_bits=64, store_bits=64), "half of it is for the last chunk, masked"),
    "* permute._scatter": (Limits(load_bits=64), "the rows of a token's copies, 8 bytes each"),
    "* permute._count": (Limits(load_bits=32, store_bits=0), "8 bytes of an expert, 1 of a flag"),
    "* permute._place": (Limits(load_bits=32, store_bits=64), "8 bytes of an expert, 1 of a flag"),
    "* onebit._unpack": (Limits(load_bits=16), "a byte has the signs of 8 elements"),
    "* random._normal": (
        Limits(load_bits=32, store_bits=32),
        "a slice of a stream may start anywhere; the loads are of constants of a sine's slow path",
    ),
    "* grouped_linear 6x1024x2052x1402 *": (Limits(load_bits=48, store_bits=32), "even widths"),
    "* grouped_linear 6x1024x2057x1401 *": (Limits(load_bits=16, store_bits=16), "odd widths"),
    "* syrk 770x65 *": (Limits(load_bits=16, store_bits=16), "an odd width"),
    "* top_k.*": (Limits(load_bits=32, store_bits=32), "rows of few experts, k numbers of each"),
}


class Row(NamedTuple):
    """A kernel of a case, compiled for a dtype and an architecture."""

    arch: int
    dtype: str
    case: str
    kernel: str

    def __str__(self):
        return f"sm_{self.arch} {self.dtype} {self.case} {self.kernel}"


def first_of(table, row):
    """The value of the first pattern that a row's name matches."""
    return next((value for pattern, value in table.items() if fnmatch(str(row), pattern)), None)


ROWS = [
    Row(arch, dtype, f"{entry} {label}".strip(), kernel)
    for arch in (80, 90)
    for dtype, table in (("bf16", BF16), ("fp32", FP32), ("bf16", SM90 if arch == 90 else []))
    for entry, labels, kernels in table
    for label in labels or ("",)
    for kernel in kernels
]
PREFETCHED = [  # rows are fetched before they are read
    Row(90, "bf16", "layer_norm 4096", "norm._backward"),
    Row(90, "bf16", "cross_entropy_padded 50257", "cross_entropy._row_parts"),
    Row(90, "bf16", "cross_entropy_padded 50257", "cross_entropy._losses_and_gradient"),
]
HANDFUL = {
    (90, "bf16", "flash 128"),
    (90, "bf16", "layer_norm 4096"),
    (90, "bf16", "cross_entropy_padded 50257"),
    (90, "bf16", "grouped_linear 128x2048x2048x1536"),
    (90, "bf16", "lamb"),
    (80, "fp32", "route 128x8"),
}  # a case of each kind, which is compiled whatever has changed


def over_budget(rows):
    """A line for each row that exceeds its budget, or that its case does not launch."""
    compiled = compile_rows(rows)
    return [
        f"{row}: {'; '.join(found)}"
        for row in rows
        if (found := problems(row, compiled[row]) if compiled[row] else ["not launched"])
    ]


def compile_rows(rows):
    """Row -> what it was compiled to, in a process per architecture and dtype."""
    cases, found = defaultdict(dict), defaultdict(list)
    for row in rows:
        cases[row.arch, row.dtype][row.case] = True
    with tempfile.TemporaryDirectory() as folder:
        for (arch, dtype), names in cases.items():
            file = Path(folder) / f"{arch}-{dtype}.json"
            flags = ["--arch", str(arch), "--dtype", dtype, "--json", str(file), "--only", *names]
            command = [sys.executable, str(SCRIPT), *flags]
            done = subprocess.run(command, capture_output=True, text=True)
            assert file.exists(), done.stderr
            for kernel in json.loads(file.read_text())["rows"]:
                found[Row(arch, dtype, kernel["case"], kernel["name"])].append(kernel)
    return found


def problems(row, kernels):
    """What the kernels of a row exceed, in words."""
    limits, _ = first_of(OWN, row) or (Limits(), "")
    found = set()
    for kernel in kernels:
        if kernel["error"]:
            found.add(kernel["error"])
            continue
        code = kernel["code"]
        found |= {"smem", "registers", "no-wgmma", "serialized"} & set(kernel["verdict"])
        for what in ("spill_stores", "spill_loads"):
            if code[what] > limits.spills:
                found.add(f"{what} {code[what]} B > {limits.spills}")
        for what in ("load_bits", "store_bits"):
            if 0 < code[what] < getattr(limits, what):
                found.add(f"{what} {code[what]:.0f} < {getattr(limits, what)}")
        if row in PREFETCHED and not code["units"].get("cp.async"):
            found.add("no cp.async: its rows are not prefetched")
    return sorted(found)
