"""Which configuration of a kernel is launched, and which of a library's and our kernels.

Choices are measured under `tuning()` alone, never while a model trains: ranks that measured for
themselves could choose differently, and sums in another order differ in their last bits. They are
kept per device, kernel, dtype and magnitudes (powers of two) in the user's cache folder and, for
devices that have been measured, in choices.json beside this file. Without one the default holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

Config = Mapping[str, Any]
Table = dict[str, dict[str, dict[str, Any]]]  # kernel -> bucket -> config

SHIPPED = Path(__file__).with_name("choices.json")
_tuned: ContextVar[Table | None] = ContextVar("tuned", default=None)


def choose(
    kernel: str,
    x: Tensor,
    magnitudes: Sequence[int],
    configs: Sequence[Config],
    launch: Callable[[Config], object],
) -> Config | None:
    """The configuration measured for arguments of x's dtype and of about these magnitudes."""
    bucket = bucket_of(x.dtype, magnitudes)
    table = _tuned.get()
    if table is not None and bucket not in table.setdefault(kernel, {}):
        table[kernel][bucket] = dict(min(configs, key=lambda config: _milliseconds(launch, config)))
    known = _known(x.device) if table is None else table
    found = known.get(kernel, {}).get(bucket)
    return found if found in configs else None


def fastest(op: str, x: Tensor, magnitudes: Sequence[int]) -> str | None:
    """Whose function was measured to be the fastest on x's device ("mtcli": ours), if any was."""
    found = _known(x.device).get(op, {}).get(bucket_of(x.dtype, magnitudes), {})
    return cast(str | None, found.get("by"))


def bucket_of(dtype: torch.dtype, magnitudes: Sequence[int]) -> str:
    """Such as "bfloat16 4096": each magnitude rounded up to a power of two."""
    rounded = [str(1 << max(0, n - 1).bit_length()) for n in magnitudes]
    return " ".join([str(dtype).removeprefix("torch."), *rounded])


@contextmanager
def tuning() -> Iterator[Table]:
    """Inside, each launch of a kernel with alternatives first times them all, on its arguments.

    Kernels that overwrite their arguments do so many times: results inside are not to be used.
    Gives the table of what was chosen, for `save`.
    """
    token = _tuned.set({})
    try:
        table = _tuned.get()
        assert table is not None, "set above"
        yield table
    finally:
        _tuned.reset(token)


def save(table: Table, device: torch.device, file: Path | None = None) -> Path:
    """Adds a device's choices to those of a file, the user's where none is named; returns it."""
    file = file or user_file()
    known = json.loads(file.read_text()) if file.exists() else {}
    mine = known.setdefault(device_name(device), {})
    for kernel, buckets in table.items():
        mine.setdefault(kernel, {}).update(buckets)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    partial.replace(file)
    _known.cache_clear()
    return file


def user_file() -> Path:
    """Where choices of this user's devices are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "mtcli" / "kernels.json"


def device_name(device: torch.device) -> str:
    """Such as "NVIDIA H200", by which choices are kept."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _known(device: torch.device) -> Table:
    """What both files say of a device; the user's own measurement is nearer."""
    table: Table = {}
    for file in (SHIPPED, user_file()):
        known = json.loads(file.read_text()) if file.exists() else {}
        for kernel, buckets in known.get(device_name(device), {}).items():
            table.setdefault(kernel, {}).update(buckets)
    return table


def _milliseconds(launch: Callable[[Config], object], config: Config) -> float:
    """The median time of a launch; infinite where the device cannot hold the configuration."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return float(do_bench(lambda: launch(config), return_mode="median"))
    except OutOfResources:
        return float("inf")
