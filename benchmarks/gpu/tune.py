"""Chooses each kernel's configuration for the sizes of the benchmarks on this GPU."""

from pathlib import Path

import torch
from harness import passes

from mtcli.kernels.choices import save, tuning


def tune(entries) -> Path:
    """Times every configuration of every launch; returns the file that keeps the best."""
    with tuning() as table:
        for entry in entries:
            for dtype in entry.dtypes:
                for size in entry.sizes:
                    arguments = entry.make("cuda", dtype, *size)
                    for make in passes(entry).values():
                        make(entry, entry.ours, arguments)()
    return save(table, torch.device("cuda"))
