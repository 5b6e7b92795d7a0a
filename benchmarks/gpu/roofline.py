"""Estimates what each kernel of the benchmark reaches on an H200, from its compiled code.

An SM runs its programs side by side. Those of a loop or tile that moves b bytes take

    max(programs * b / bandwidth, programs * issue, latency + issue)

cycles, where the first is the ideal; `latency` is that of 40 KiB, the loads that keep the memory of
an H200 busy. A loop of GEMMs takes tensor + issue + exponentials cycles where a softmax stands
between them, the larger of tensor and issue elsewhere, and in both at least its loads from L2.
What launches, tails of a grid and masked tiles cost is left out, so estimates are upper ones.
"""

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from machine_code import KIB, Loop
from record import RESULTS
from table import table

# H200 SXM: 132 SMs, 989 TFLOP/s of 4096 per cycle and SM; and what a copy and a GEMM reach.
SMS, HZ = 132, 1.83e9
FLOORS = {"copy_bytes_per_s": 4.3e12, "flop_per_s": 790e12}
PEAK_FLOP = SMS * HZ * 4096
BUSY_BYTES = 40 * KIB
L2_BYTES_PER_S = 6.5e12
# The flash backward computes 7 GEMMs for the 5 that count.
USEFUL = {"flash_backward._dkv": 5 / 7}
HEAD = ["kernels", "size", "MB", "GFLOP", "limit", "an SM has", "cycles of an iteration"]
HEAD += ["estimate, at most", "measured"]


def estimates(kernels: list[Any], results: Path = RESULTS) -> list[str]:
    """The lines of a table: of each pass, size and dtype of the benchmark a share of its limit."""
    from recipes import CASES

    record = newest(results)
    floors = FLOORS | {name: record[name] for name in FLOORS if name in record}
    measured = {row_key(row): row for row in record.get("rows", []) if "ms" in row}
    rows = []
    for (case, dtype, phase), launched in grouped(kernels):
        entry = CASES[case].entry
        for size in CASES[case].sizes:
            known = measured.get((entry.name, phase, size, dtype))
            if cell := cells(entry, phase, size, launched, floors, known):
                rows.append(cell)
    against = f"{record['device']}, {record['date']}" if record else "nothing"
    return [
        "## Estimates for an H200",
        "",
        f"Shares of a copy at {floors['copy_bytes_per_s'] / 1e12:.2f} TB/s or of a GEMM at "
        f"{floors['flop_per_s'] / 1e12:.0f} TFLOP/s. The estimates are arithmetic on the compiled "
        f"code (`benchmarks/gpu/roofline.py`); measured: {against}.",
        "",
        *table(HEAD, rows),
    ]


def newest(results: Path) -> dict[str, Any]:
    """The latest record of the kernels on an H200; empty where there is none."""
    found = sorted(results.glob("kernels-*H200*.json"))
    return json.loads(found[-1].read_text()) if found else {}


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return row["entry"], row["pass"], tuple(row["size"]), dtype[row["dtype"].split(".")[1]]


def grouped(kernels: Iterable[Any]) -> Iterator[tuple[tuple[str, str, str], list[Any]]]:
    """The kernels of each case, dtype and pass."""
    found: dict[tuple[str, str, str], list[Any]] = {}
    for kernel in kernels:
        if kernel.code is not None and kernel.is_default:
            found.setdefault((kernel.case, kernel.dtype, kernel.phase), []).append(kernel)
    yield from found.items()


def cells(entry, phase, size, kernels, floors, known) -> list[str]:
    """A row: the work, what limits it, what the code allows, and two shares of the limit.

    Empty where a library's GEMM is the limit.
    """
    forward, itemsize = phase == "forward", 4 if kernels[0].dtype == "fp32" else 2
    moved = (entry.forward_bytes if forward else entry.backward_bytes)(itemsize, *size)
    flop = (entry.forward_flops if forward else entry.backward_flops)(*size)
    of_copy = moved / floors["copy_bytes_per_s"] >= flop / floors["flop_per_s"]
    working = [k for k in kernels if bool(k.code.loop.tensor) != of_copy and traffic(k.code.loop)]
    tiles = [traffic(kernel.code.loop) for kernel in working]
    if of_copy and len(size) == 2 and len(working) == 1:
        tiles = [tile_bytes(working[0], moved, *size)]
    if not working:
        return []
    estimate = memory_share(working, tiles, floors) if of_copy else gemm_share(working, floors)
    measured = known and known["of_copy" if of_copy else "of_product"]
    return [
        f"{entry.name} {phase}: " + ", ".join(dict.fromkeys(k.name for k in working)),
        " x ".join(map(str, size)),
        f"{moved / 1e6:,.0f}" if moved else "",
        f"{flop / 1e9:,.0f}" if flop else "",
        "copy" if of_copy else "GEMM",
        "; ".join(f"{k.code.programs} x {k.code.warps} warps, {k.code.in_flight_kib:.0f} KiB"
                  for k in working),
        "; ".join(
            cycles(k.code.loop, b if of_copy else 0) for k, b in zip(working, tiles, strict=True)
        ),
        f"{estimate:.0%}",
        f"{measured:.0%}" if measured else "",
    ]  # fmt: skip


def cycles(loop: Loop, tile: float) -> str:
    """The cycles of an iteration in words; `tile` are the bytes that it moves, 0 of a GEMM."""
    if tile:
        return f"memory {tile / FLOORS['copy_bytes_per_s'] * SMS * HZ:.0f}, issue {loop.issue:.0f}"
    return f"tensor {loop.tensor:.0f}, issue {loop.issue:.0f}, exp {loop.exponentials:.0f}"


def traffic(loop: Loop) -> int:
    """Bytes that an iteration of one program reads and writes, weights and statistics too."""
    return loop.loaded_bytes + loop.stored_bytes


def tile_bytes(kernel: Any, moved: int, rows: int, width: int) -> float:
    """The bytes that must be moved of a tile of [rows, width], whose last tiles may be half empty.

    A weight or bias that all rows share is not among them.
    """
    sizes = kernel.constants | kernel.config
    columns = sizes.get("COLUMNS") or sizes.get("BLOCK") or width
    return moved / rows / -(-width // columns) * sizes.get("ROWS", 1)


def memory_share(kernels: list[Any], tiles: list[float], floors: dict[str, float]) -> float:
    """The share of the copy's rate that kernels reach one after another."""
    per_cycle = floors["copy_bytes_per_s"] / SMS / HZ
    taken = 0.0
    for kernel, tile in zip(kernels, tiles, strict=True):
        issue, programs = kernel.code.loop.issue, max(1, kernel.code.programs)
        memory = programs * tile / per_cycle
        needed = max(memory, programs * issue, BUSY_BYTES / per_cycle + issue)
        taken += tile * needed / memory
    return sum(tiles) / taken


def gemm_share(kernels: list[Any], floors: dict[str, float]) -> float:
    """The share of the GEMM's rate that kernels reach one after another, of the FLOP that count."""
    ideal = taken = 0.0
    useful = 1.0
    for kernel in kernels:
        loop, config = kernel.code.loop, kernel.config
        sides = (config.get(name) or config["SIDE"] for name in ("ROWS", "COLUMNS"))
        tile = prod(sides) * config.get("INNER", 1)
        ideal += loop.tensor / tile
        taken += gemm_cycles(loop) / tile
        useful = USEFUL.get(kernel.name, useful)
    return useful * ideal / taken * PEAK_FLOP / floors["flop_per_s"]


def gemm_cycles(loop: Loop) -> float:
    parts = loop.tensor, loop.issue, loop.exponentials
    busy = sum(parts) if loop.exponentials else max(parts)
    return max(busy, loop.loaded_bytes / L2_BYTES_PER_S * SMS * HZ)
