"""Reads what a compiled kernel costs from its machine code: no GPU and no CUDA toolkit needed.

cuobjdump and nvdisasm are in Triton's wheel. Spilled bytes are those of the instructions that reach
local memory and are not in the PTX, which are the numbers that `ptxas -v` prints. Those in the PTX
reach arrays, such as the 28 bytes of a sine's slow path, for angles above 105615.
"""

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

WARP = 32
KIB = 1024


class Device(NamedTuple):
    """A multiprocessor (SM): CUDA C++ programming guide, table of technical specifications.

    `tensor` is FLOP per cycle of dense 16-bit GEMMs with float32 sums; float32 as tf32 has half.
    """

    program_kib: int  # shared memory that one program may have
    shared_kib: int
    threads: int
    programs: int
    tensor: int
    registers: int = 65536
    schedulers: int = 4
    exponentials: int = 16  # per cycle


DEVICES = {
    80: Device(163, 164, 2048, 32, 2048),
    86: Device(99, 100, 1536, 16, 1024),
    89: Device(99, 100, 1536, 24, 1024),
    90: Device(227, 228, 2048, 32, 4096),
    100: Device(227, 228, 2048, 32, 8192),
}
# Instructions by what they stand for.
KINDS = {
    "wgmma": ("HGMMA", "IGMMA", "QGMMA"),
    "mma": ("HMMA", "IMMA", "QMMA"),
    "tcgen05": ("UTCHMMA", "UTCQMMA"),
    "tma": ("UTMALDG", "UBLKCP"),
    "cp.async": ("LDGSTS",),
    "atomic": ("ATOM", "ATOMG", "RED", "REDG"),
    "double": ("DFMA", "DADD", "DMUL"),
}
LOADS, STORES = ("LDG", "LDGSTS"), ("STG",)
BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # of an access; others have 4


class Instruction(NamedTuple):
    """A line of machine code."""

    address: int
    name: str  # with its modifiers
    target: int  # address that a branch goes to; of all else one after its own


@dataclass(frozen=True)
class Loop:
    """One iteration of a program: cycles that a whole SM would take for each part, and bytes."""

    tensor: float
    issue: float
    exponentials: float
    spilled: int  # accesses of local memory per thread
    loaded_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class MachineCode:
    """What a kernel needs of an SM, and how it reaches memory."""

    warps: int
    registers: int
    shared_bytes: int
    spill_stores: int  # bytes per thread
    spill_loads: int
    programs: int  # that one SM holds at once
    limited_by: str
    load_bits: float  # of the access of global memory that a byte comes by, on average
    store_bits: float
    in_flight_kib: float  # loads that a full SM waits for at once
    multiplies: bool
    serialized: bool  # each wgmma waits for the one before it
    units: dict[str, int]
    loop: Loop  # that multiplies most or, without any, loads most; the whole kernel without loops


def machine_codes(kernels: Sequence[Any], arch: int) -> list[MachineCode]:
    """The costs of kernels that Triton compiled for an architecture, such as 90."""
    lines = disassemble([kernel.asm["cubin"] for kernel in kernels], arch)
    return [_machine_code(*each, DEVICES[arch]) for each in zip(kernels, lines, strict=True)]


def _machine_code(compiled: Any, lines: list[Instruction], device: Device) -> MachineCode:
    used = _tool("cuobjdump", compiled.asm["cubin"], "-res-usage")
    registers, static = (int(re.search(rf"{key}:(\d+)", used)[1]) for key in ("REG", "SHARED"))
    data, code = compiled.metadata, Counter(line.name for line in lines)
    warps, shared = data.num_warps, max(data.shared, static)
    programs, limited_by = occupancy(device, registers, warps, shared)
    units = {kind: _count(code, names) for kind, names in KINDS.items()}
    loop = _busiest([*loops(lines), code], warps, device)
    return MachineCode(
        warps=warps,
        registers=registers,
        shared_bytes=shared,
        spill_stores=_bytes(code, ("STL",)) - array_bytes(compiled.asm["ptx"], "st"),
        spill_loads=_bytes(code, ("LDL",)) - array_bytes(compiled.asm["ptx"], "ld"),
        programs=programs,
        limited_by=limited_by,
        load_bits=_bits(code, LOADS),
        store_bits=_bits(code, STORES),
        in_flight_kib=programs * loop.loaded_bytes / KIB,
        multiplies="tt.dot" in compiled.asm["ttir"],
        serialized=1 < units["wgmma"] <= code["WARPGROUP.DEPBAR.LE"],
        units={kind: count for kind, count in units.items() if count},
        loop=loop,
    )


def occupancy(device: Device, registers: int, warps: int, shared: int) -> tuple[int, str]:
    """(programs that an SM holds, what limits them)."""
    # A warp's registers come in units of 256 and stay on one of the schedulers.
    each = -(-max(registers, 16) // 8) * 8 * WARP
    warps_each = device.registers // device.schedulers // each
    bounds = {
        "threads": device.threads // (warps * WARP),
        "registers": warps_each * device.schedulers // warps,
        "shared": device.shared_kib * KIB // (-(-shared // 128) * 128 + KIB),
        "programs": device.programs,
    }
    by = min(bounds, key=bounds.__getitem__)
    return bounds[by], by


def array_bytes(ptx: str, access: str) -> int:
    """Bytes that a thread loads ("ld") from local arrays, or stores ("st") to them."""
    found = re.findall(rf"\b{access}\.local\.(?:v(\d)\.)?\w(\d+)", ptx)
    return sum(int(count or 1) * int(bits) // 8 for count, bits in found)


def loops(lines: list[Instruction]) -> list[Counter[str]]:
    """The instructions of every loop, innermost ones first, without those of loops inside."""
    at = {line.address: i for i, line in enumerate(lines)}
    spans = [(at[line.target], i) for i, line in enumerate(lines) if line.target <= line.address]
    taken: set[int] = set()
    found = []
    for first, last in sorted(spans, key=lambda span: span[1] - span[0]):
        inside = [i for i in range(first, last + 1) if i not in taken]
        taken.update(inside)
        found.append(Counter(lines[i].name for i in inside))
    return found


def _busiest(bodies: list[Counter[str]], warps: int, device: Device) -> Loop:
    """The loop that a program spends its time in; the last body is the whole kernel."""
    found = [_loop(body, warps, device) for body in bodies]
    if any(loop.tensor for loop in found):
        return max(found[:-1] or found, key=lambda loop: loop.tensor)
    return max((x for x in found[:-1] if x.loaded_bytes), key=_traffic, default=found[-1])


def _traffic(loop: Loop) -> int:
    return loop.loaded_bytes + loop.stored_bytes


def _loop(body: Counter[str], warps: int, device: Device) -> Loop:
    flop = sum(count * _flop(name, warps) for name, count in body.items())
    exponentials = sum(count for name, count in body.items() if name.startswith("MUFU"))
    return Loop(
        tensor=flop / device.tensor,
        issue=sum(body.values()) * warps / device.schedulers,
        exponentials=exponentials * warps * WARP / device.exponentials,
        spilled=_count(body, ("LDL", "STL")),
        loaded_bytes=_bytes(body, LOADS) * warps * WARP,
        stored_bytes=_bytes(body, STORES) * warps * WARP,
    )


def _flop(name: str, warps: int) -> float:
    """FLOP of an instruction by all warps of a program, those of tf32 twice as they are as slow."""
    word, *parts = name.split(".")
    scale = 2 if "TF32" in parts else 1
    if word in KINDS["wgmma"]:  # of a warpgroup: 64 x N x K
        m, n, k = (int(size) for size in parts[0].split("x"))
        return scale * 2 * m * n * k * warps / 4
    if word in KINDS["mma"]:  # of a warp: 16 x 8 x K
        return scale * 2 * 16 * 8 * int(parts[0][3:]) * warps
    return 0.0


def _count(code: Counter[str], words: tuple[str, ...]) -> int:
    return sum(count for name, count in code.items() if name.split(".")[0] in words)


def _width(name: str) -> int:
    """Bytes of a thread's access."""
    return next((BYTES[part] for part in name.split(".") if part in BYTES), 4)


def _bytes(code: Counter[str], words: tuple[str, ...]) -> int:
    return sum(n * _width(name) for name, n in code.items() if name.split(".")[0] in words)


def _bits(code: Counter[str], words: tuple[str, ...]) -> float:
    """The mean over bytes: a few scalars beside 16 bytes at once do not count for much."""
    widths = {name: _width(name) for name in code if name.split(".")[0] in words}
    total = sum(code[name] * width for name, width in widths.items())
    return 8 * sum(code[name] * width**2 for name, width in widths.items()) / max(1, total)


def disassemble(cubins: Sequence[bytes], arch: int) -> list[list[Instruction]]:
    """The instructions of each binary, all by one call of nvdisasm, which starts for 0.2 s."""
    if not cubins:
        return []
    codes = [_code(cubin) for cubin in cubins]
    family = f"SM{arch}" + "a" * (arch >= 90)
    text = _tool("nvdisasm", b"".join(codes), "--no-dataflow", "--binary", family)
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Zx0-9_.]+)([^;]*)"
    found: list[list[Instruction]] = [[] for _ in codes]
    ends = list(accumulate(map(len, codes)))
    for address, name, operands in re.findall(pattern, text):
        at = int(address, 16)
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if name.startswith("BRA") else None
        line = Instruction(at, name, int(target[1], 16) if target else at + 1)
        found[bisect_right(ends, at)].append(line)
    return found


def _code(cubin: bytes) -> bytes:
    """The instructions of a binary's functions: its ELF sections `.text.*`."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    (*_, strings, _) = headers[names]
    sections = [
        cubin[at : at + n]
        for name, _, _, _, at, n in headers
        if cubin.startswith(b".text.", strings + name)
    ]
    return b"".join(sections)


def _tool(name: str, file: bytes, *arguments: str) -> str:
    """What one of NVIDIA's tools prints of a file."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as written:
        written.write(file)
        written.flush()
        command = [path, *arguments, written.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
