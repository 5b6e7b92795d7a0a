"""Comparing two checkpoints tensor by tensor, whatever their layouts and formats."""

from collections.abc import Iterable, Iterator
from functools import partial
from math import inf, isfinite, nan
from typing import NamedTuple

import torch

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.describe import tensor_bytes
from mtcli.core.checkpoint.dtypes import dtype_name
from mtcli.core.checkpoint.names import is_optimizer
from mtcli.core.checkpoint.workers import Memory, Progress, run_parts, shares
from mtcli.core.spec.sharding import SLAB_BYTES, slabs


class Difference(NamedTuple):
    """A tensor that is not the same in two checkpoints, and how."""

    name: str
    what: str


def optimizer_kinds(checkpoint: Checkpoint) -> list[str]:
    """The kinds of optimizer state that a checkpoint has, such as optimizer.exp_avg."""
    return sorted({name.partition("/")[0] for name in checkpoint.names() if is_optimizer(name)})


def shared_names(a: Checkpoint, b: Checkpoint) -> list[str]:
    """The tensors to compare: all of either; where one has no optimizer state, weights alone."""
    both = bool(optimizer_kinds(a) and optimizer_kinds(b))
    names = dict.fromkeys([*a.names(), *b.names()])
    return [name for name in names if both or not is_optimizer(name)]


def differences(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None = None
) -> Iterator[Difference]:
    """Every tensor that differs in shape, dtype or any bit, in order.

    With `dtype`, weights of `a` are first converted to it. A slab of each side is held at a time.
    """
    return _differences(a, b, dtype, shared_names(a, b), lambda _: None)


def first_difference(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, nproc: int, progress: Progress
) -> tuple[Difference | None, Memory]:
    """The first of `differences`, which `nproc` processes look for, and what they took at most."""
    names = shared_names(a, b)
    weights = [tensor_bytes(a if name in a.tensors else b, name) for name in names]
    parts = [[names[i] for i in part] for part in shares(weights, nproc)]
    found, memory = run_parts(partial(_first, a, b, dtype), parts, progress)
    order = {name: index for index, name in enumerate(names)}
    known = [difference for difference in found if difference is not None]
    return min(known, key=lambda found: order[found.name], default=None), memory


def verify_hashes(a: Checkpoint, nproc: int, progress: Progress) -> Memory:
    """`Checkpoint.verify_hashes` by `nproc` processes, and what they took at most."""
    weights = [record.bytes for _, record in sorted(a.files.items())]
    return run_parts(partial(_verify, a), shares(weights, nproc), progress)[1]


def _first(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, names: list[str], progress: Progress
) -> Difference | None:
    return next(_differences(a, b, dtype, names, progress), None)


def _verify(a: Checkpoint, files: list[int], progress: Progress) -> None:
    for index in files:
        a.verify_hashes(index, len(a.files))
        progress(0)


def _differences(
    a: Checkpoint,
    b: Checkpoint,
    dtype: torch.dtype | None,
    names: Iterable[str],
    progress: Progress,
) -> Iterator[Difference]:
    for name in names:
        if what := _difference(a, b, name, None if a.keeps_dtype(name) else dtype):
            yield Difference(name, what)
        if name in a.tensors:
            progress(tensor_bytes(a, name))


def _difference(a: Checkpoint, b: Checkpoint, name: str, dtype: torch.dtype | None) -> str:
    for side in (a, b):
        if name not in side.tensors:
            return f"is not in {side.folder}"
    if a.shape(name) != b.shape(name):
        return f"is {list(a.shape(name))} and {list(b.shape(name))}"
    expected = dtype or a.dtype(name)
    if expected != b.dtype(name):
        return f"is {dtype_name(expected)} and {dtype_name(b.dtype(name))}"
    return _unequal(a, b, name, expected)


def _unequal(a: Checkpoint, b: Checkpoint, name: str, dtype: torch.dtype) -> str:
    """How many elements of a tensor differ, and by how much; "" where every bit is the same."""
    same, unequal, largest, count = True, 0, -inf, 0
    for slab in slabs(a.shape(name), SLAB_BYTES // dtype.itemsize):
        x, y = a.read(name, slab).to(dtype), b.read(name, slab)
        count += x.numel()
        bits = [z.reshape(-1, 1).view(torch.uint8) for z in (x, y)]  # [elements, bytes of one]
        if torch.equal(*bits):
            continue
        same, unequal = False, unequal + int((bits[0] != bits[1]).any(1).sum())
        apart = float((x.double() - y.double()).abs().max())
        largest = nan if apart != apart or largest != largest else max(largest, apart)
    if same:
        return ""
    how = f"by at most {largest:g}" if isfinite(largest) else "NaN or infinity among them"
    return f"differs in {unequal} of {count} elements, {how}"
