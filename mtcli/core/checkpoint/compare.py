"""Comparing two checkpoints tensor by tensor, whatever their layouts and formats."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.dtypes import dtype_name
from mtcli.core.checkpoint.names import is_optimizer


class Difference(NamedTuple):
    """A tensor that is not the same in two checkpoints, and how."""

    name: str
    what: str


def shared_names(a: Checkpoint, b: Checkpoint) -> list[str]:
    """The tensors to compare: all of either; where one has no optimizer state, weights alone."""
    both = all(any(map(is_optimizer, side.names())) for side in (a, b))
    names = dict.fromkeys([*a.names(), *b.names()])
    return [name for name in names if both or not is_optimizer(name)]


def differences(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None = None
) -> Iterator[Difference]:
    """Every tensor that differs in shape, dtype or any bit, in order.

    With `dtype`, weights of `a` are first converted to it. Two tensors are held at a time.
    """
    for name in shared_names(a, b):
        if what := _difference(a, b, name, None if a.keeps_dtype(name) else dtype):
            yield Difference(name, what)


def _difference(a: Checkpoint, b: Checkpoint, name: str, dtype: torch.dtype | None) -> str:
    for side in (a, b):
        if name not in side.tensors:
            return f"is not in {side.folder}"
    if a.shape(name) != b.shape(name):
        return f"is {list(a.shape(name))} and {list(b.shape(name))}"
    expected = dtype or a.dtype(name)
    if expected != b.dtype(name):
        return f"is {dtype_name(expected)} and {dtype_name(b.dtype(name))}"
    x, y = a.read(name).to(expected), b.read(name)
    if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return ""
    unequal = int((x != y).sum())
    largest = float((x.double() - y.double()).abs().max())
    return f"differs in {unequal} of {x.numel()} elements, by at most {largest:g}"
