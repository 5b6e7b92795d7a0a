"""Kernels that are bound by memory: each row of theirs is read and written once."""

import importlib.util

from harness import Entry, leaf

from mtcli.kernels.swiglu import swiglu, swiglu_reference

ROWS = 32768


def liger(name: str) -> dict:
    """Liger's function of a name, where the package is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    table = {"swiglu": lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1))}
    return {"liger": table[name]} if name in table else {}


ENTRIES = [
    Entry(
        "swiglu",
        swiglu,
        {"torch": swiglu_reference, **liger("swiglu")},
        lambda device, dtype, rows, width: (leaf((rows, 2 * width), dtype, device),),
        sizes=[(ROWS, 768), (ROWS, 5632), (ROWS, 14336)],
        small=(5, 22),
        forward_bytes=lambda itemsize, rows, width: 3 * rows * width * itemsize,
        backward_bytes=lambda itemsize, rows, width: 5 * rows * width * itemsize,
    ),
]
