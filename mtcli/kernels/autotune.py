"""The autotune table: the fastest config of each kernel, and the fastest backend of an operation.

Configs are timed inside `autotuning()` alone, never in training: ranks could measure different
winners, and another order of a sum changes its last bits. Entries are by device, kernel, dtype and
sizes (rounded up to powers of two), in the user's cache folder and, for devices that were measured,
in choices.json in this folder. A device without an entry of its own takes that of a device with its
compute capability, best one with as many multiprocessors (an H100 has an H200's of both). Without
any a kernel uses its default config.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

LaunchConfig = Mapping[str, Any]
AutotuneTable = dict[str, dict[str, dict[str, Any]]]  # kernel -> bucket -> config

SHIPPED = Path(__file__).with_name("choices.json")
# Where the table of a device has the facts of the device itself, in place of a kernel and a bucket.
DEVICE, FACTS = "device", "facts"
# The tables of `autotuning()`, innermost last. Process-wide: on a GPU the kernels of a backward are
# launched by autograd's device threads, whose context variables are all at their defaults.
_timing: list[AutotuneTable] = []


class DeviceFacts(NamedTuple):
    """The facts of a GPU on which the fastest config depends."""

    capability: str  # such as "9.0"
    multiprocessors: int


def best_config(
    kernel: str,
    x: Tensor,
    sizes: Sequence[int],
    configs: Sequence[LaunchConfig],
    launch: Callable[[LaunchConfig], object],
) -> LaunchConfig | None:
    """The config measured to be fastest for x's dtype and sizes like these; None without a
    measurement."""
    bucket = bucket_of(x.dtype, sizes)
    table = _timing[-1] if _timing else None
    if table is not None and bucket not in table.setdefault(kernel, {}):
        table[kernel][bucket] = dict(min(configs, key=lambda config: _milliseconds(launch, config)))
    measured = _measured(x.device) if table is None else table
    best = measured.get(kernel, {}).get(bucket)
    return best if best in configs else None


def fastest_backend(op: str, x: Tensor, sizes: Sequence[int]) -> str | None:
    """The backend measured to be fastest on x's device ("mtcli" is the Triton kernel), or None."""
    entry = _measured(x.device).get(op, {}).get(bucket_of(x.dtype, sizes), {})
    return cast(str | None, entry.get("by"))


def bucket_of(dtype: torch.dtype, sizes: Sequence[int]) -> str:
    """The table's key of a dtype and sizes, such as "bfloat16 4096": sizes are rounded up to a
    power of two, flags are unchanged."""
    rounded = [str(n if n < 2 else 1 << (n - 1).bit_length()) for n in map(int, sizes)]
    return " ".join([str(dtype).removeprefix("torch."), *rounded])


@contextmanager
def autotuning(initial: AutotuneTable | None = None) -> Iterator[AutotuneTable]:
    """Inside, each launch of a kernel with several configs first times them on its arguments.

    A kernel that overwrites its arguments does so many times, so results are invalid. Yields the
    table of the fastest configs, for `save_table`; entries of `initial` are not timed again.
    """
    table = merged(initial or {})
    _timing.append(table)
    try:
        yield table
    finally:
        _timing.pop()


def merged(*tables: AutotuneTable) -> AutotuneTable:
    """The entries of several tables; later tables override earlier ones."""
    entries: AutotuneTable = {}
    for table in tables:
        for kernel, buckets in table.items():
            entries.setdefault(kernel, {}).update(buckets)
    return entries


def save_table(table: AutotuneTable, device: torch.device) -> Path:
    """Adds a device's table to the user's file, with its facts, and returns the file's path."""
    write_table(merged(table, facts_table(device)), device_name(device), user_file())
    return user_file()


def write_table(table: AutotuneTable, device: str, file: Path) -> None:
    """Adds the table of a device to a file."""
    tables = json.loads(file.read_text()) if file.exists() else {}
    tables[device] = merged(tables.get(device, {}), table)
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=file.parent, delete=False) as partial:
        partial.write(json.dumps(tables, indent=1, sort_keys=True) + "\n")
    os.replace(partial.name, file)
    _measured.cache_clear()


def user_file() -> Path:
    """The path of this user's table."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "mtcli" / "kernels.json"


def device_name(device: torch.device) -> str:
    """The key of a device in a table, such as "NVIDIA H200"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_facts(device: torch.device) -> DeviceFacts | None:
    """The facts of a GPU; None of a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return DeviceFacts(capability, properties.multi_processor_count)


def facts_table(device: torch.device) -> AutotuneTable:
    """The facts of a GPU as an entry of its table."""
    facts = device_facts(device)
    return {} if facts is None else {DEVICE: {FACTS: facts._asdict()}}


@cache
def _measured(device: torch.device) -> AutotuneTable:
    """The entries for a device from both files, the user's after the shipped ones: those of devices
    with its capability, nearest in multiprocessors last, then its own."""
    name, facts, ranked = device_name(device), device_facts(device), []
    for file in (SHIPPED, user_file()):
        for other, table in (json.loads(file.read_text()) if file.exists() else {}).items():
            distance = 0 if other == name else _distance(table, facts)
            if distance is not None:
                ranked.append((other == name, -distance, table))
    # a stable sort: of equal ones the user's stays after the shipped
    return merged(*(table for *_, table in sorted(ranked, key=lambda row: row[:2])))


def _distance(table: AutotuneTable, facts: DeviceFacts | None) -> int | None:
    """How many multiprocessors a table's device has more or less; None of another capability."""
    noted = table.get(DEVICE, {}).get(FACTS)
    if facts is None or noted is None or noted["capability"] != facts.capability:
        return None
    return abs(int(noted["multiprocessors"]) - facts.multiprocessors)


def _milliseconds(launch: Callable[[LaunchConfig], object], config: LaunchConfig) -> float:
    """The median time of a launch, without compilation; infinite where it fails to compile or
    launch.

    Raises errors that leave the device unusable.
    """
    from triton.errors import TritonError
    from triton.testing import do_bench

    try:
        return float(do_bench(lambda: launch(config), return_mode="median"))
    except (TritonError, RuntimeError):
        # A sticky CUDA error, such as of an illegal address, is raised again by whatever follows.
        torch.cuda.synchronize()
        return float("inf")
