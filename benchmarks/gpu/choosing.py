"""Chooses a kernel's configuration, and a library's function where it is faster, on this GPU."""

import torch
from harness import passes, tried

from mtcli.kernels.choices import Table, bucket_of, save, tuning


def tune(entry) -> Table:
    """Times what there is to choose from, at the sizes of an entry; returns what it kept."""
    with tuning() as table:
        for _, _, arguments in cases(entry):
            for make in passes(entry).values():
                make(entry, entry.ours, arguments)()
    keep(table)
    by_whom: Table = {}
    for dtype, size, arguments in cases(entry) if entry.chosen else ():
        bucket = bucket_of(dtype, entry.magnitudes(*size))
        by_whom.setdefault(entry.name, {})[bucket] = {"by": fastest(entry, arguments)}
    keep(by_whom)
    return merged(table, by_whom)


def keep(table: Table) -> None:
    """Has kernels of this user take these choices from now on."""
    if table:
        save(table, torch.device("cuda"))


def merged(*tables: Table) -> Table:
    """The choices of several tables."""
    found: Table = {}
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
        name: sum(tried(make(entry, function, arguments), 0, 3) for make in passes(entry).values())
        for name, function in functions.items()
    }
    best = min(times, key=times.__getitem__)
    return best if times[best] < 0.98 * times["mtcli"] else "mtcli"
