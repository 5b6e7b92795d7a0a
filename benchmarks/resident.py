"""Measures the resident memory of this process around a call."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def peak_mib(call: Callable[[], object]) -> float:
    """MiB that a call needs at its peak, above what is resident at its start."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
    before = _kib("VmRSS")
    call()
    return (_kib("VmHWM") - before) / 2**10


def _kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field)))
