"""Chooses a kernel's configuration, and a library's function where it is faster, on this GPU."""

from functools import partial

import torch
from harness import passes, tried

from mtcli.kernels.autotune import AutotuneTable, autotuning, bucket_of, save_table


def tune(entry) -> AutotuneTable:
    """Times what there is to choose from, at the sizes of an entry; returns what it kept."""
    with autotuning() as table:
        for _, _, arguments in cases(entry):
            for make in passes(entry).values():
                make(entry, entry.ours, arguments)()
    keep(table)
    by_whom: AutotuneTable = {}
    for dtype, size, arguments in cases(entry) if entry.chosen else ():
        bucket = bucket_of(dtype, entry.magnitudes(*size))
        by_whom.setdefault(entry.name, {})[bucket] = {"by": fastest(entry, arguments)}
    keep(by_whom)
    return merged(table, by_whom)


def keep(table: AutotuneTable) -> None:
    """Has kernels of this user take these choices from now on."""
    if table:
        save_table(table, torch.device("cuda"))


def merged(*tables: AutotuneTable) -> AutotuneTable:
    """The choices of several tables."""
    found: AutotuneTable = {}
    for table in tables:
        for kernel, buckets in table.items():
            found.setdefault(kernel, {}).update(buckets)
    return found


def cases(entry):
    for dtype in entry.dtypes:
        for size in entry.sizes:
            yield dtype, size, entry.make("cuda", dtype, *size)


def fastest(entry, arguments) -> str:
    """Who is, forward and backward together: "mtcli" unless another is by more than 2 %."""
    functions = {"mtcli": entry.ours} | {name: entry.rivals[name] for name in entry.chosen}
    times = {
        name: sum(
            tried(partial(make, entry, function, arguments), 0, 3)
            for make in passes(entry).values()
        )
        for name, function in functions.items()
    }
    best = min(times, key=times.__getitem__)
    return best if times[best] < 0.98 * times["mtcli"] else "mtcli"
