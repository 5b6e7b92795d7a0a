"""Chooses a kernel's configuration, and torch's function where it is faster, on this GPU."""

import torch
from harness import milliseconds, passes

from mtcli.kernels.choices import Table, bucket_of, save, tuning


def tune(entry) -> Table:
    """Times what there is to choose from, at the sizes of an entry; returns what it kept."""
    with tuning() as table:
        for _, _, arguments in cases(entry):
            for make in passes(entry).values():
                make(entry, entry.ours, arguments)()
    keep(table)
    ours_or_torchs: Table = {}
    for dtype, size, arguments in cases(entry) if entry.by_library else ():
        who = "torch" if torch_is_faster(entry, arguments) else "mtcli"
        ours_or_torchs.setdefault(entry.name, {})[bucket_of(dtype, size[-1:])] = {"by": who}
    keep(ours_or_torchs)
    return merged(table, ours_or_torchs)


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


def torch_is_faster(entry, arguments) -> bool:
    """By more than 2 %, forward and backward together."""
    first = next(iter(entry.rivals.values()))
    ours, theirs = (
        sum(milliseconds(make(entry, function, arguments), 0, 3) for make in passes(entry).values())
        for function in (entry.ours, first)
    )
    return theirs < 0.98 * ours
