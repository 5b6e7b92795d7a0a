"""Chooses a kernel's configuration, and a library's function where it is faster, on this GPU."""

from functools import partial

import torch
from harness import passes, tried

from mtcli.kernels.autotune import (
    AutotuneTable,
    autotuning,
    bucket_of,
    facts_table,
    merged,
    save_table,
)


def tune(entry, device, dtype, size, known: AutotuneTable) -> AutotuneTable:
    """Times what there is to choose from at a size of an entry, and is not yet known.

    Returns what it kept, with the facts of the device.
    """
    arguments = entry.make(device, dtype, *size)
    with autotuning(known) as table:
        for make in passes(entry).values():
            make(entry, entry.ours, arguments)()
    keep(table, device)
    bucket = bucket_of(dtype, entry.magnitudes(*size))
    if entry.chosen and bucket not in known.get(entry.name, {}):
        # With the configs just kept.
        table.setdefault(entry.name, {})[bucket] = {"by": fastest(entry, arguments)}
        keep(table, device)
    kept = {
        kernel: new
        for kernel, buckets in table.items()
        if (new := {b: c for b, c in buckets.items() if b not in known.get(kernel, {})})
    }
    return merged(kept, facts_table(torch.device(device))) if kept else kept


def chosen(rows) -> AutotuneTable:
    """What rows of a record say was fastest."""
    return merged(*(row.get("chosen", {}) for row in rows))


def keep(table: AutotuneTable, device: str) -> None:
    """Has kernels of this user take these choices from now on."""
    if table:
        save_table(table, torch.device(device))


def fastest(entry, arguments) -> str:
    """Who is, forward and backward together: "mtcli" unless another is by more than 2 %."""
    functions = {"mtcli": entry.ours} | {name: entry.rivals[name] for name in entry.chosen}
    times = {
        name: sum(
            tried(partial(make, entry, function, arguments), 3) for make in passes(entry).values()
        )
        for name, function in functions.items()
    }
    best = min(times, key=times.__getitem__)
    return best if times[best] < 0.98 * times["mtcli"] else "mtcli"
