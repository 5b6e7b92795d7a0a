"""The autotune table: the fastest config of each kernel, and the fastest backend of an operation.

Configs are timed under `autotuning()` alone, never while a model trains: ranks that timed for
themselves could choose differently, and sums in another order differ in their last bits. Results
are kept per device, kernel, dtype and sizes (rounded up to powers of two), in the user's cache
folder and, for devices that have been measured, in choices.json beside this file. Without an entry
a kernel launches its default config.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

import torch
from torch import Tensor

LaunchConfig = Mapping[str, Any]
AutotuneTable = dict[str, dict[str, dict[str, Any]]]  # kernel -> bucket -> config

SHIPPED = Path(__file__).with_name("choices.json")
# The tables of `autotuning()`, innermost last. Process-wide: on a GPU the kernels of a backward are
# launched by autograd's device threads, whose context variables are all at their defaults.
_timing: list[AutotuneTable] = []


def best_config(
    kernel: str,
    x: Tensor,
    sizes: Sequence[int],
    configs: Sequence[LaunchConfig],
    launch: Callable[[LaunchConfig], object],
) -> LaunchConfig | None:
    """The config measured to be fastest for x's dtype and about these sizes, if any was."""
    bucket = bucket_of(x.dtype, sizes)
    table = _timing[-1] if _timing else None
    if table is not None and bucket not in table.setdefault(kernel, {}):
        table[kernel][bucket] = dict(min(configs, key=lambda config: _milliseconds(launch, config)))
    measured = _measured(x.device) if table is None else table
    best = measured.get(kernel, {}).get(bucket)
    return best if best in configs else None


def fastest_backend(op: str, x: Tensor, sizes: Sequence[int]) -> str | None:
    """The backend measured to be fastest on x's device ("mtcli": our kernel), if any was."""
    entry = _measured(x.device).get(op, {}).get(bucket_of(x.dtype, sizes), {})
    return cast(str | None, entry.get("by"))


def bucket_of(dtype: torch.dtype, sizes: Sequence[int]) -> str:
    """Such as "bfloat16 4096": each size rounded up to a power of two, and flags as they are."""
    rounded = [str(n if n < 2 else 1 << (n - 1).bit_length()) for n in map(int, sizes)]
    return " ".join([str(dtype).removeprefix("torch."), *rounded])


@contextmanager
def autotuning(initial: AutotuneTable | None = None) -> Iterator[AutotuneTable]:
    """Inside, each launch of a kernel with several configs first times them, on its arguments.

    Kernels that overwrite their arguments do so many times: results inside are not to be used.
    Yields the table of what was fastest, for `save_table`; what `initial` has is not timed again.
    """
    table = merged(initial or {})
    _timing.append(table)
    try:
        yield table
    finally:
        _timing.pop()


def merged(*tables: AutotuneTable) -> AutotuneTable:
    """The entries of several tables; the last one's win."""
    entries: AutotuneTable = {}
    for table in tables:
        for kernel, buckets in table.items():
            entries.setdefault(kernel, {}).update(buckets)
    return entries


def save_table(table: AutotuneTable, device: torch.device) -> Path:
    """Adds a device's table to the user's file, which it returns."""
    write_table(table, device_name(device), user_file())
    return user_file()


def write_table(table: AutotuneTable, device: str, file: Path) -> None:
    """Adds the table of the device of a name to a file."""
    tables = json.loads(file.read_text()) if file.exists() else {}
    tables[device] = merged(tables.get(device, {}), table)
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=file.parent, delete=False) as partial:
        partial.write(json.dumps(tables, indent=1, sort_keys=True) + "\n")
    os.replace(partial.name, file)
    _measured.cache_clear()


def user_file() -> Path:
    """The table of this user's devices."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "mtcli" / "kernels.json"


def device_name(device: torch.device) -> str:
    """The key of a device in a table, such as "NVIDIA H200"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _measured(device: torch.device) -> AutotuneTable:
    """Both files' entries of a device; the user's own win."""
    files = [json.loads(file.read_text()) for file in (SHIPPED, user_file()) if file.exists()]
    return merged(*(tables.get(device_name(device), {}) for tables in files))


def _milliseconds(launch: Callable[[LaunchConfig], object], config: LaunchConfig) -> float:
    """The median time of a launch, compiled before; infinite where it fails to compile or launch.

    Raises what leaves the device of no use to any later launch.
    """
    from triton.errors import TritonError
    from triton.testing import do_bench

    try:
        return float(do_bench(lambda: launch(config), return_mode="median"))
    except (TritonError, RuntimeError):
        # A sticky CUDA error, such as of an illegal address, is raised again by whatever follows.
        torch.cuda.synchronize()
        return float("inf")
